"""Opens a Hugging Face folder for its evaluation: a job with jaxpar's decoder and the folder's tokenizer."""

import json
from dataclasses import dataclass
from pathlib import Path

from jaxpar.data.tokenizers.tokenizer_facts import NAME as TOKENIZER
from jaxpar.errors import JaxparError, refuse
from jaxpar.job.evaluation.evaluated_model import EvaluatedModel, without_training
from jaxpar.job.evaluation.overrides import check_overrides, choose_data, key_of, with_defaults
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.pretrained_start import check_start
from jaxpar.job.pretrained import start_from_params
from jaxpar.models.huggingface.config import read_settings
from jaxpar.models.huggingface.folder import CONFIG, read_config
from jaxpar.step.state import State
from jaxpar.step.step import Step

EXAMPLES = 8  # rows of a batch, unless train.global_batch says another number
LONGEST = 2048  # tokens of a row, unless data.seq says another number


@dataclass(frozen=True, kw_only=True)
class PretrainedModel(EvaluatedModel):
    """The model of a Hugging Face folder; see `EvaluatedModel`."""

    def read_state(self, step: Step, number: int | None) -> State:
        """Reads the parameters, each device its part.

        Raises:
          JaxparError: If a tensor is missing, or of another shape.
        """
        start = check_start(self.job, step.layout)
        fresh, seed = start.origin.fresh, self.job.train.seed
        return start_from_params(step.layout, step.optimizer, start.params, fresh=fresh, seed=seed)

    def check_data(self, fingerprint: str) -> None:
        """Accepts any data, because a Hugging Face folder does not record the data that the model was trained on."""


def open_pretrained(
    folder: Path, checkpoints: str, overrides: tuple[str, ...], work: Path, *, allow_import: bool
) -> PretrainedModel:
    """Opens a Hugging Face folder for an evaluation; without overrides of the mesh, on one device.

    Args:
      folder: The folder with a config.json.
      checkpoints: last; a folder holds one model.
      overrides: Overrides of the job, among them the data.
      work: A new folder in which texts are packed.
      allow_import: Whether the job may import Python objects from any module.

    Raises:
      JaxparError: If the overrides name no data, or do not fit the model.
    """
    if checkpoints != "last":
        raise refuse(
            f"--checkpoints {checkpoints} of {folder}",
            rule="a Hugging Face folder holds one model",
            fix="leave --checkpoints out",
        )
    if faults := check_overrides(overrides):
        raise JaxparError(*faults)
    choice = choose_data(overrides)
    if not choice.is_other and not choice.sets:
        raise refuse(
            f"{folder}, a Hugging Face folder, without data",
            rule="the folder of a model names no data to evaluate it on",
            fix=f"jaxpar evaluate {folder} data.source=text data.path=FILE",
        )
    words = [*_defaults(folder, overrides), *with_defaults(overrides, choice)]
    job = loads(f"[model]\nname = {json.dumps(str(folder))}\n", words, allow_import=allow_import)
    job = without_training(job, work, starts=True)
    if job.data.is_text and job.data.tokenizer == "bpe":
        raise refuse(
            f"data.tokenizer = 'bpe' of {folder}",
            rule="a model is evaluated on the tokens that it was trained on, and bpe trains others on the text",
            fix="jaxpar evaluate RUN, of the run that it was exported from",
        )
    return PretrainedModel(job=job, choice=choice, steps=(None,), several=False, has_data=choice.is_other)


def _defaults(folder: Path, overrides: tuple[str, ...]) -> list[str]:
    """Returns overrides for the keys that the folder decides: its tokenizer, and the length of a row."""
    folder = folder.expanduser()
    _, settings = read_settings(read_config(folder / CONFIG))
    defaults = [f"train.global_batch={EXAMPLES}", f"data.seq={min(settings.seq, LONGEST)}"]
    if (folder / TOKENIZER).is_file():
        defaults.append(f"data.tokenizer={json.dumps(str(folder))}")
    if not any(key_of(override).startswith(("mesh.", "parallel.")) for override in overrides):
        defaults.append("mesh.devices=1")
    return defaults
