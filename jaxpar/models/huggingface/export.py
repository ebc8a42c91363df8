"""Writes a decoder in Hugging Face's format, one tensor at a time."""

import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.errors import JaxparError, Problem, refuse, shape_differences
from jaxpar.files import check_local
from jaxpar.models.huggingface.config import make_config
from jaxpar.models.huggingface.folder import CONFIG, check_links, copy_small_files, is_folder, read_config, special_ids
from jaxpar.models.huggingface.load import shorten
from jaxpar.models.huggingface.param_mapping import ParamMapping, groups, param_mappings, tensor_shape, to_tensor
from jaxpar.models.huggingface.safetensors import FLOATS, TensorSource, write
from jaxpar.models.settings.decoder import DecoderConfig


def export(
    params: Mapping[str, Any],
    settings: DecoderConfig,
    folder: str | Path,
    *,
    dtype: DTypeLike | None = None,
    max_file_bytes: int = 5 * 10**9,
    origin: str | Path | None = None,
) -> list[Path]:
    """Writes a decoder in files that transformers, and programs that read its format, can load.

    Args:
      params: The parameters, nested or by path: anything with `shape`, `dtype` and `[...]`, on devices or off.
      settings: Settings of the decoder.
      folder: Output folder; must contain no model.
      dtype: Dtype of the written tensors: float32, bfloat16 or float16; by default that of the parameters.
      max_file_bytes: Maximum bytes per file; a larger model is written as several files with an index.
      origin: The Hugging Face folder that the decoder was loaded from; its tokenizer, special ids and generation config
        are copied too.

    Returns:
      The written files.

    Raises:
      JaxparError: If Hugging Face has no such model, parameters do not fit the settings, or files cannot be written.
    """
    flat = _flatten(params)
    tensor_dtype = None if dtype is None else float_dtype(dtype)
    name = (tensor_dtype or np.dtype(flat["embed"].dtype)).name if "embed" in flat else "float32"
    kind, config = make_config(settings, name, origin=_family(origin))
    table = param_mappings(kind, settings)
    if problems := _mismatches(flat, table):
        raise JaxparError(*problems)
    tensors = tensor_sources(flat, table, tensor_dtype)
    return write_model(folder, tensors, config, max_file_bytes=max_file_bytes, origin=origin)


def write_model(
    folder: str | Path,
    tensors: Sequence[TensorSource],
    config: Mapping[str, Any],
    *,
    max_file_bytes: int,
    origin: str | Path | None,
) -> list[Path]:
    """Writes tensors, config.json and the small files of `origin` to a folder; returns the written files.

    Raises:
      JaxparError: If the folder holds a model or cannot be written, or `check_links` refuses the origin.
    """
    check_local(folder, "folder")
    folder = Path(folder).expanduser()
    source = Path(origin).expanduser() if origin else None
    if source:
        check_links(source)
    rule = "a model is exported into a folder that holds none"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if models := [*folder.glob("*.safetensors*"), *folder.glob("config.json")]:
            raise refuse(f"{folder} holds {models[0].name}", rule=rule, fix="another folder, or empty this one")
        written = write(folder, tensors, max_file_bytes=max_file_bytes)
        config = {**config, **special_ids(source)} if source else config
        (folder / CONFIG).write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise refuse(f"{folder}: {error.strerror}", rule=rule, fix="a folder that can be written, with room") from error
    return [*written, folder / CONFIG, *(copy_small_files(source, folder) if source else ())]


def float_dtype(dtype: DTypeLike | None) -> np.dtype:
    """Returns a dtype that weights are written in, or refuses another."""
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result not in FLOATS:
        names = ", ".join(choice.name for choice in FLOATS)
        raise refuse(f"dtype={dtype!r:.60}", rule=f"weights are written in {names}", fix='dtype="float32"')
    return result


def _family(origin: str | Path | None) -> str:
    """Returns the family of the folder that a decoder was loaded from."""
    folder = Path(origin or "").expanduser()
    return str(read_config(folder / CONFIG).get("model_type")) if origin and is_folder(folder) else ""


def tensor_sources(
    flat: Mapping[str, Any], table: list[ParamMapping], dtype: np.dtype | None = None
) -> list[TensorSource]:
    """Returns the tensors of parameters by path, each computed when it is written; by default in their own dtypes."""
    return [
        TensorSource(
            name.format(*place),
            dtype or np.dtype(flat[group[0].path].dtype),
            tensor_shape(group),
            partial(_fetch, group, flat, place),
        )
        for name, group in groups(table).items()
        for place in np.ndindex(group[0].stacked)
    ]


def _fetch(group: list[ParamMapping], flat: Mapping[str, Any], place: tuple[int, ...]) -> np.ndarray:
    """Copies a tensor to the host in Hugging Face's layout, one layer of a stack at a time."""
    return to_tensor(group, [np.asarray(flat[rule.path][place or ...]) for rule in group])


def _flatten(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flatten(value, f"{above}{key}/") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _mismatches(flat: Mapping[str, Any], table: list[ParamMapping]) -> list[Problem]:
    problems = shape_differences(flat, {rule.path: rule.shape for rule in table}, owner="this decoder")
    rule, fix = "they are those of a decoder of these settings", "its own settings"
    return [Problem(f"parameters {kind}: {shorten(names)}", rule, fix) for kind, names in problems.items()]
