"""Checks that a job can start from a Hugging Face model, before text is packed and before any weight is read."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from jaxpar.checkpoint import Checkpoints, start_from
from jaxpar.checkpoint.manifest import SavedArray
from jaxpar.checkpoint.start_from import Origin
from jaxpar.data.spec import OURS
from jaxpar.data.tokenizers.tokenizer_facts import NAME, read_tokenizer
from jaxpar.errors import JaxparError, Problem, refuse
from jaxpar.job.file.dump import toml_value
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.schema import Job
from jaxpar.job.parts.names import model_settings
from jaxpar.models.huggingface.config import differences
from jaxpar.models.huggingface.folder import TOKENIZERS
from jaxpar.models.huggingface.weights import Pretrained, Tensor, load
from jaxpar.models.settings.decoder import DecoderConfig
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.adapters import checkpoint_leaves


@dataclass(frozen=True, kw_only=True)
class PretrainedStart:
    """The parameters of a Hugging Face folder that a job starts from.

    Attributes:
      params: Maps a path in the job's model to the parameter, which is read when it is indexed.
      origin: How the folder's parameters map to the job's.
      kind: The folder's family, or the rules by which it is read.
    """

    params: Mapping[str, Tensor]
    origin: Origin
    kind: str


def check_start(job: Job, layout: Layout) -> PretrainedStart:
    """Opens the Hugging Face folder that `checkpoint.start_from` names; weights are not read.

    If only a part is taken, the job's model may be any with parameters of these shapes; by `checkpoint.rules` it may be
    any model.

    Args:
      job: The job.
      layout: The layout of its model.

    Raises:
      JaxparError: If the folder cannot be read, or the job's model or tokenizer differs.
    """
    spec, defaults = job.checkpoint, Checkpoints()
    if spec.rules:
        return _start_by_rules(job, layout)
    is_decoder = job.model["name"] == "decoder"
    model = load(spec.start_from, padded_vocab=model_settings(job).padded_vocab if is_decoder else 0)
    is_default = (spec.take, spec.rename, spec.cast) == (defaults.take, defaults.rename, defaults.cast)
    problems = [*(_other_model(job, model) if is_default else ()), *_other_tokens(job, model.settings.vocab)]
    if problems:
        raise JaxparError(*problems)
    origin = _origin(spec, layout, model.params)
    params = {path: model.params[source_path] for path, source_path in origin.source_paths.items()}
    return PretrainedStart(params=params, origin=origin, kind=f"a Hugging Face {model.kind}")


def import_rules(job: Job) -> Any:
    """Imports the rules of `checkpoint.rules`.

    Raises:
      JaxparError: If there is no such object, or it may not be imported.
    """
    return import_object(job.checkpoint.rules, "checkpoint.rules", allowed=job.allow_import)


def _start_by_rules(job: Job, layout: Layout) -> PretrainedStart:
    from jaxpar.train.api.huggingface import from_huggingface  # other jobs do not load it

    spec = job.checkpoint
    if problems := _other_tokens(job, None):
        raise JaxparError(*problems)
    tensors = from_huggingface(spec.start_from, layout, import_rules(job), skip=spec.skip)
    params = {path: tensor for path, tensor in tensors.items() if tensor is not None}
    origin = _origin(replace(spec, rules="", skip=(), take=tuple(params)), layout, params)
    return PretrainedStart(params=params, origin=origin, kind=f"read by {spec.rules}")


def _origin(spec: Checkpoints, layout: Layout, params: Mapping[str, Tensor]) -> Origin:
    source_arrays = {path: SavedArray(tensor.shape, str(tensor.dtype), 0) for path, tensor in params.items()}
    targets = {
        path: SavedArray(leaf.shape, str(jnp.dtype(leaf.dtype)), leaf.bytes)
        for path, leaf in checkpoint_leaves(layout.blueprint).items()
    }
    return start_from.plan(spec, Path(spec.start_from), source_arrays, targets)


def decoder_settings(job: Job) -> DecoderConfig:
    """Returns the settings of the job's decoder.

    Raises:
      JaxparError: If its model is not a decoder.
    """
    if job.model["name"] != "decoder":
        raise refuse(
            f"model.name = {job.model['name']!r}",
            rule="models of Hugging Face are read and written for jaxpar's decoder, and for others by rules",
            fix='model.name = "decoder", or checkpoint.rules = "my_module:RULES", as for jp.from_huggingface',
        )
    return model_settings(job)


def _other_model(job: Job, found: Pretrained) -> list[Problem]:
    settings = decoder_settings(job)
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


def _other_tokens(job: Job, vocab: int | None) -> list[Problem]:
    """Reports a tokenizer other than the pretrained model's, whose vocabulary has `vocab` tokens (None if unknown)."""
    if not job.data.is_text:
        return []
    folder = Path(job.checkpoint.start_from).expanduser()
    if job.data.tokenizer not in OURS and read_tokenizer(job.data.tokenizer).digest == _digest(folder):
        return []
    tokenizer = next((path.name for name in TOKENIZERS for path in sorted(folder.glob(name))), None)
    if tokenizer is None and vocab in (None, job.data.tokens):
        return []  # a folder that jaxpar exported from a byte or bpe run
    text = f"has a tokenizer of its own ({tokenizer})" if tokenizer else f"knows {vocab} tokens"
    return [
        Problem(
            f"data.source = {job.data.source!r} in {job.data.tokens} tokens of data.tokenizer = "
            f"{job.data.tokenizer!r}, and {folder} {text}",
            "a pretrained model is trained further with its own tokenizer",
            f"data.tokenizer = {str(folder)!r}"
            if tokenizer == NAME
            else "AutoTokenizer.from_pretrained(folder).save_pretrained(folder) writes tokenizer.json, which is read; "
            "or tokenize the text by it, np.savez(path, inputs=..., targets=...) [n, seq], data.source = 'arrays'",
        )
    ]


def _digest(folder: Path) -> str:
    """Returns the digest of a folder's tokenizer, "" if it has no tokenizer.json."""
    return read_tokenizer(folder).digest if (folder / NAME).is_file() else ""
