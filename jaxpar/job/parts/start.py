"""Checks that a model of Hugging Face's can begin a job, before text is packed and before a number is read."""

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpar.checkpoint import Checkpoints, start_from
from jaxpar.checkpoint.manifest import Array
from jaxpar.checkpoint.start_from import Origin
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.files import NAME
from jaxpar.data.tokenizers.saved import saved
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.names import settings_of
from jaxpar.models.huggingface.config import config_of
from jaxpar.models.huggingface.folder import TOKENIZERS
from jaxpar.models.huggingface.load import Pretrained, load
from jaxpar.models.settings.decoder import DecoderSettings
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import begun_with

FREE = ("dropout", "scan")  # settings that change no number of a trained model


def check_start(job: Job, layout: Layout) -> tuple[Pretrained, Origin]:
    """Returns the model in the folder of Hugging Face's that `checkpoint.start_from` names, and what is taken of it.

    Its numbers are not read. Where a part is taken, the job's model may be any that has parameters of these shapes.

    Args:
      job: The job.
      layout: Of its model.

    Raises:
      JaxparError: If the folder cannot be read, or the job has another model or other tokens.
    """
    spec, usual = job.checkpoint, Checkpoints()
    found = load(spec.start_from)
    whole = (spec.take, spec.rename, spec.cast) == (usual.take, usual.rename, usual.cast)
    problems = [*(_other_model(job, found) if whole else ()), *_other_tokens(job, found)]
    if problems:
        raise JaxparError(*problems)
    theirs = {path: Array(tensor.shape, str(tensor.dtype), 0) for path, tensor in found.params.items()}
    wanted = {
        path: Array(leaf.shape, str(jnp.dtype(leaf.dtype)), leaf.bytes)
        for path, leaf in begun_with(layout.blueprint).items()
    }
    return found, start_from.plan(spec, Path(spec.start_from), theirs, wanted)


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
    if job.data.tokenizer not in OURS and saved(job.data.tokenizer).digest == _digest(folder):
        return []
    tokenizer = next((path.name for name in TOKENIZERS for path in sorted(folder.glob(name))), None)
    if tokenizer is None and found.settings.vocab == job.data.tokens:
        return []  # as jaxpar writes a decoder of its own text
    its = f"has a tokenizer of its own ({tokenizer})" if tokenizer else f"knows {found.settings.vocab} tokens"
    return [
        Problem(
            f"data.source = {job.data.source!r} in {job.data.tokens} tokens of data.tokenizer = "
            f"{job.data.tokenizer!r}, and {folder} {its}",
            "a model is trained further on the tokens that it knows",
            f"data.tokenizer = {str(folder)!r}"
            if tokenizer == NAME
            else "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json, which is read; "
            "or tokenize the text by it, np.savez(path, inputs=..., targets=...) [n, seq], data.source = 'arrays'",
        )
    ]


def _digest(folder: Path) -> str:
    """Returns what tells the tokenizer of a folder from others, "" where it has no tokenizer.json."""
    return saved(folder).digest if (folder / NAME).is_file() else ""
