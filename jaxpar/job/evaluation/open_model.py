"""Opens a trained model for its evaluation: a run, or a Hugging Face folder.

RUN/job.toml, checkpoints/, data/   ─► the job without what only training needs, the checkpoints, the run's tokens
a folder with a config.json         ─► a job with jaxpar's decoder and the folder's tokenizer
"""

import json
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import Checkpoints, Store, array_files, listing, manifest, reading, saved_replicas
from jaxpar.checkpoint.differences import differences, problems
from jaxpar.data.tokenizers.tokenizer_facts import NAME as TOKENIZER
from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.job.evaluation.evaluated_model import (
    DataChoice,
    EvaluatedModel,
    check_overrides,
    check_own_data,
    choose_data,
    override_key,
    with_defaults,
    without_training,
)
from jaxpar.job.file.parse import loads
from jaxpar.job.file.run_folder import NAME, check_same_data, read_job
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.batches import with_saved_tokenizer
from jaxpar.job.parts.names import model_settings
from jaxpar.job.parts.pretrained_start import check_start
from jaxpar.job.run_weights import start_from_params
from jaxpar.models.huggingface.config import read_settings
from jaxpar.models.huggingface.folder import CONFIG, read_config
from jaxpar.models.settings.reference_models import MODELS
from jaxpar.step.state import State
from jaxpar.step.step import Step

END = "<end>"  # the token 0 of jaxpar's own BPE
EXAMPLES = 8  # rows of a batch, unless train.global_batch says another number
LONGEST = 2048  # tokens of a row, unless data.seq says another number


@dataclass(frozen=True, kw_only=True)
class RunModel(EvaluatedModel):
    """The model of a run; see `EvaluatedModel`.

    Attributes:
      folder: The run folder.
    """

    folder: Path

    def read_state(self, step: Step, number: int | None) -> State:
        """Reads the parameters to evaluate, and the model state; the state of the optimizer is not read.

        Raises:
          JaxparError: If the checkpoint is damaged or does not fit the job.
        """
        folder, like = self.folder / "checkpoints", step.abstract()
        if self.several:
            return Store(folder, self.job.checkpoint, is_owner=False).restore(like, number)[0]
        path = listing.find(self.folder, number)
        contents = reading.read_manifest(path)
        saved = saved_replicas.describe_as_one(contents.arrays, contents.replicas)
        saved = {
            name: array for name, array in saved.items() if name.partition("/")[0] not in ("optimizer", "exchange")
        }
        if faults := problems(differences(saved, array_files.describe(like)), str(self.folder)):
            raise JaxparError(*faults)
        return array_files.unflatten(like, saved_replicas.read_as_one(path, contents, array_files.flatten(like)))

    def check_data(self, fingerprint: str) -> None:
        """Refuses data that differ from those that the run recorded.

        Raises:
          JaxparError: If they differ.
        """
        recorded = check_same_data(self.folder, None).get("data", fingerprint)
        if recorded != fingerprint:
            raise refuse(
                f"{self.folder} was trained on data {recorded}, the job's data is {fingerprint} now",
                rule="a run's held-out examples are part of the data that it was trained on",
                fix="the data as it was; or data.path=FILE of other data, all of which are evaluated",
            )


def open_run(where: Path, checkpoints: str, overrides: tuple[str, ...], work: Path, *, allow_import: bool) -> RunModel:
    """Opens a run, or one of its checkpoints, for an evaluation.

    Args:
      where: The run folder, or one checkpoint in it.
      checkpoints: last, all, best, or steps such as 100,200.
      overrides: Overrides of the job.
      work: A new folder, which gets links to the run's data, and is where other texts are packed.
      allow_import: Whether the job may import Python objects from any module.

    Raises:
      JaxparError: If the folder has no such checkpoint, or the overrides do not fit.
    """
    folder = where
    if is_checkpoint(where):
        if checkpoints != "last":
            raise refuse(
                f"--checkpoints {checkpoints} of {where}, which is one checkpoint",
                rule="a run folder has several checkpoints",
                fix=f"{where.resolve().parent.parent} --checkpoints {checkpoints}",
            )
        folder, checkpoints = where.resolve().parent.parent, str(int(where.resolve().name))
    if faults := check_overrides(overrides):
        raise JaxparError(*faults)
    trained, choice = read_job(folder, allow_import=allow_import), choose_data(overrides)
    text = (folder / NAME).read_text(encoding="utf-8")
    job = loads(text, with_defaults(overrides, choice), allow_import=allow_import)
    check_own_data(overrides, choice, is_text=trained.data.is_text)
    steps = choose_steps(folder, checkpoints, trained.checkpoint)
    job = choice.select_sets(_with_tokens_of_run(job, folder, choice))
    _link_data(folder, work)
    several = bool(job.sweep.over) or job.effective_parallel.exchange.global_model == NO_MODEL
    job = copy_model_sizes(with_saved_tokenizer(trained, folder), job)
    job = without_training(job, work, starts=job.train.adapters.base == "int8", several=several)
    return RunModel(folder=folder, job=job, choice=choice, steps=steps, several=several, has_data=True)


def is_checkpoint(where: Path) -> bool:
    """Whether a path is one checkpoint of a run."""
    return (where / manifest.NAME).is_file() and not (where / "checkpoints").is_dir()


def choose_steps(folder: Path, checkpoints: str, spec: Checkpoints) -> tuple[int, ...]:
    """Returns the steps of the checkpoints to evaluate, oldest first.

    Raises:
      JaxparError: If there is no checkpoint, none of a step, or none with a score.
    """
    available = listing.steps(folder / "checkpoints")
    if not available:
        raise refuse(
            f"no checkpoint in {folder / 'checkpoints'}",
            rule="a run is evaluated at its checkpoints",
            fix="train it first: jaxpar train JOB",
        )
    if checkpoints == "all":
        return tuple(available)
    if checkpoints == "last":
        return (available[-1],)
    if checkpoints == "best":
        return (_best_step(folder, available, spec),)
    words = [word.strip() for word in checkpoints.split(",")]
    wrong = [word for word in words if not word.isascii() or not word.isdigit() or int(word) not in available]
    if wrong:
        raise refuse(
            f"--checkpoints {checkpoints}: no checkpoint {wrong[0]!r:.80} in {folder / 'checkpoints'}",
            rule="--checkpoints is last, all, best, or steps of checkpoints with commas",
            fix=f"--checkpoints {available[-1]}; there are {', '.join(map(str, available[-20:]))}",
        )
    return tuple(sorted({int(word) for word in words}))


def _best_step(folder: Path, available: list[int], spec: Checkpoints) -> int:
    ranked = listing.rank(folder / "checkpoints", available, spec)
    if not ranked:
        raise refuse(
            f"--checkpoints best: no checkpoint in {folder / 'checkpoints'} has the score {spec.best}",
            rule="the best checkpoint is the one whose evaluation while training was the best",
            fix="--checkpoints all, or train.eval_every when it is trained",
        )
    return min(ranked)[1]


def copy_model_sizes(trained: Job, job: Job) -> Job:
    """Sets the vocabulary and context length of the model, which the trained job's data decide, and other data do not.

    Args:
      trained: The job of the run.
      job: The same job with other data.
    """
    if trained.model["name"] not in MODELS or not trained.data.is_text:
        return job
    settings: Any = model_settings(trained)
    sizes = {key: getattr(settings, key) for key in ("vocab", "seq") if hasattr(settings, key)}
    return replace(job, model=job.model | sizes)


def _with_tokens_of_run(job: Job, folder: Path, choice: DataChoice) -> Job:
    """Makes text be read with the tokenizer that the run saved; other text must not train a BPE of its own."""
    job = with_saved_tokenizer(job, folder)
    if not job.data.is_text or job.data.tokenizer != "bpe" or not choice.is_other:
        return job
    recorded = check_same_data(folder, None).get("data", "")
    files = sorted((folder / "data").glob(f"bpe-{job.data.vocab}-*.json"))
    if not files:
        raise refuse(
            f"no tokenizer in {folder / 'data'}",
            rule="other text is evaluated in the tokens of the run, whose folder has its tokenizer",
            fix="the folder of a run that was trained",
        )
    file = next((path for path in files if recorded and recorded in path.name), files[-1])
    return replace(job, data=replace(job.data, tokenizer=str(file.absolute()), end=END))


def _link_data(folder: Path, work: Path) -> None:
    """Links the run's packed texts and checkpoints into a folder; the run's own folder is not written to."""
    (work / "data").mkdir()
    for path in (folder / "data").glob("*"):
        if path.is_file():
            (work / "data" / path.name).symlink_to(path.absolute())
    (work / "checkpoints").symlink_to((folder / "checkpoints").absolute())


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
    if not any(override_key(override).startswith(("mesh.", "parallel.")) for override in overrides):
        defaults.append("mesh.devices=1")
    return defaults
