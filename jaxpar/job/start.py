"""Checks that a model of Hugging Face's can begin a job, before text is packed and before a number is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import Checkpoints
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.names import settings_of
from jaxpar.models.huggingface.config import config_of
from jaxpar.models.huggingface.load import Pretrained, load
from jaxpar.models.settings.decoder import DecoderSettings

FREE = ("dropout", "scan")  # settings that change no number of a trained model
# what a tokenizer of Hugging Face's is saved as; SentencePiece's is a .model
TOKENIZERS = ("tokenizer.json", "tokenizer_config.json", "vocab.json", "merges.txt", "*.model", "*.tiktoken")


def is_folder(path: str) -> bool:
    """Returns whether a path is a folder of Hugging Face's."""
    return bool(path) and (Path(path).expanduser() / "config.json").is_file()


def check_start(job: Job) -> Pretrained:
    """Returns the model in the folder of Hugging Face's that `checkpoint.start_from` names; its numbers are not read.

    Raises:
      JaxparError: If the folder cannot be read, the job has another model or other tokens, or only a part is wanted.
    """
    spec, usual = job.checkpoint, Checkpoints()
    if (spec.take, spec.rename, spec.cast) != (usual.take, usual.rename, usual.cast):
        raise refuse(
            f"checkpoint.take, rename or cast with {spec.start_from}",
            rule="checkpoint.take and rename are for jaxpar's own checkpoints; a Hugging Face model is loaded whole",
            fix="train it for no step, then start_from that run",
        )
    found = load(spec.start_from)
    problems = [*_other_model(job, found), *_other_tokens(job, found)]
    if problems:
        raise JaxparError(*problems)
    return found


def decoder_of(job: Job) -> DecoderSettings:
    """Returns the settings of the job's decoder.

    Raises:
      JaxparError: If its model is another.
    """
    if job.model["name"] != "decoder":
        raise refuse(
            f"model.name = {job.model['name']!r}",
            rule="Hugging Face's Llama and GPT-2 are read and written for jaxpar's decoder",
            fix='model.name = "decoder"',
        )
    return settings_of(job)


def _other_model(job: Job, found: Pretrained) -> list[Problem]:
    mine = decoder_of(job)
    other = _differs(mine, found.settings)
    if not other:
        return []
    has = ", ".join(f"{key} = {getattr(mine, key)!r}" for key in other)
    table = ", ".join(f"{key} = {json.dumps(value)}" for key, value in other.items())
    return [
        Problem(
            f"[model] of the job has {has}",
            f"[model] has the settings of the model in {job.checkpoint.start_from}",
            table,
        )
    ]


def _differs(mine: DecoderSettings, theirs: DecoderSettings) -> dict[str, Any]:
    """Returns the settings that differ in effect; 0 and the number that it stands for are the same."""
    config = config_of(mine, "float32")
    differ = {
        field.name: getattr(theirs, field.name)
        for field in dataclasses.fields(theirs)
        if getattr(mine, field.name) != getattr(theirs, field.name) and field.name not in FREE
    }
    return {
        key: value
        for key, value in differ.items()
        if config_of(dataclasses.replace(mine, **{key: value}), "float32") != config
    }


def _other_tokens(job: Job, found: Pretrained) -> list[Problem]:
    """Returns the problem if the job's text would be other tokens than those the model was trained on."""
    if not job.data.is_text:
        return []
    folder = Path(job.checkpoint.start_from).expanduser()
    tokenizer = next((path.name for name in TOKENIZERS for path in sorted(folder.glob(name))), None)
    if tokenizer is None and found.settings.vocab == job.data.tokens:
        return []  # as jaxpar writes a decoder of its own text
    its = f"has a tokenizer of its own ({tokenizer})" if tokenizer else f"knows {found.settings.vocab} tokens"
    return [
        Problem(
            f"data.source = {job.data.source!r} in {job.data.tokens} tokens of data.tokenizer = "
            f"{job.data.tokenizer!r}, and {folder} {its}",
            "a model is trained further on the tokens that it knows; tokenizers of Hugging Face's are not read",
            "tokenize the text with it, np.savez(path, inputs=..., targets=...) [n, seq], and data.source = 'arrays'",
        )
    ]
