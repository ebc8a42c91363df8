"""Checks that a job can start from a Hugging Face model, before text is packed and before any weight is read."""

from pathlib import Path

import jax.numpy as jnp

from jaxpar.checkpoint import Checkpoints, start_from
from jaxpar.checkpoint.manifest import SavedArray
from jaxpar.checkpoint.start_from import Origin
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.tokenizer_facts import NAME, read_tokenizer
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.file.dump import toml_value
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.names import settings_of
from jaxpar.models.huggingface.config import differences
from jaxpar.models.huggingface.folder import TOKENIZERS
from jaxpar.models.huggingface.load import Pretrained, load
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import checkpoint_leaves


def check_start(job: Job, layout: Layout) -> tuple[Pretrained, Origin]:
    """Returns the Hugging Face model that `checkpoint.start_from` names, and how its parameters map to the job's.

    Weights are not read. If only a part is taken, the job's model may be any with parameters of these shapes.

    Args:
      job: The job.
      layout: The layout of its model.

    Raises:
      JaxparError: If the folder cannot be read, or the job's model or tokenizer differs.
    """
    spec, defaults = job.checkpoint, Checkpoints()
    is_decoder = job.model["name"] == "decoder"
    model = load(spec.start_from, padded_vocab=settings_of(job).padded_vocab if is_decoder else 0)
    is_default = (spec.take, spec.rename, spec.cast) == (defaults.take, defaults.rename, defaults.cast)
    problems = [*(_other_model(job, model) if is_default else ()), *_other_tokens(job, model)]
    if problems:
        raise JaxparError(*problems)
    source_arrays = {path: SavedArray(tensor.shape, str(tensor.dtype), 0) for path, tensor in model.params.items()}
    targets = {
        path: SavedArray(leaf.shape, str(jnp.dtype(leaf.dtype)), leaf.bytes)
        for path, leaf in checkpoint_leaves(layout.blueprint).items()
    }
    return model, start_from.plan(spec, Path(spec.start_from), source_arrays, targets)


def decoder_of(job: Job) -> DecoderConfig:
    """Returns the settings of the job's decoder.

    Raises:
      JaxparError: If its model is not a decoder.
    """
    if job.model["name"] != "decoder":
        raise refuse(
            f"model.name = {job.model['name']!r}",
            rule="models of Hugging Face are read and written for jaxpar's decoder",
            fix='model.name = "decoder"',
        )
    return settings_of(job)


def _other_model(job: Job, found: Pretrained) -> list[Problem]:
    settings = decoder_of(job)
    keys = differences(settings, found.settings)
    if not keys:
        return []
    text = ", ".join(f"{key} = {getattr(settings, key)!r}" for key in keys)
    table = ", ".join(f"{key} = {toml_value(getattr(found.settings, key))}" for key in keys)
    return [
        Problem(
            f"[model] of the job has {text}",
            f"[model] has the settings of the model in {job.checkpoint.start_from}",
            table,
        )
    ]


def _other_tokens(job: Job, found: Pretrained) -> list[Problem]:
    """Reports a tokenizer that differs from the one the model was trained with."""
    if not job.data.is_text:
        return []
    folder = Path(job.checkpoint.start_from).expanduser()
    if job.data.tokenizer not in OURS and read_tokenizer(job.data.tokenizer).digest == _digest(folder):
        return []
    tokenizer = next((path.name for name in TOKENIZERS for path in sorted(folder.glob(name))), None)
    if tokenizer is None and found.settings.vocab == job.data.tokens:
        return []  # a folder that jaxpar exported from a byte or bpe run
    text = f"has a tokenizer of its own ({tokenizer})" if tokenizer else f"knows {found.settings.vocab} tokens"
    return [
        Problem(
            f"data.source = {job.data.source!r} in {job.data.tokens} tokens of data.tokenizer = "
            f"{job.data.tokenizer!r}, and {folder} {text}",
            "a model is trained further on the tokens that it knows",
            f"data.tokenizer = {str(folder)!r}"
            if tokenizer == NAME
            else "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json, which is read; "
            "or tokenize the text by it, np.savez(path, inputs=..., targets=...) [n, seq], data.source = 'arrays'",
        )
    ]


def _digest(folder: Path) -> str:
    """Returns the digest of a folder's tokenizer, "" if it has no tokenizer.json."""
    return read_tokenizer(folder).digest if (folder / NAME).is_file() else ""
