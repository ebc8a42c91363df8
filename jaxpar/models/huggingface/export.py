"""Writes a decoder in Hugging Face's format, one tensor at a time."""

import json
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.errors import JaxparError, Problem, refuse, shape_differences
from jaxpar.files import check_local
from jaxpar.models.huggingface.config import config_of
from jaxpar.models.huggingface.folder import copy_small_files, special_ids
from jaxpar.models.huggingface.load import few
from jaxpar.models.huggingface.param_mapping import ParamMapping, param_mappings, tensor_shape
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
    flat = _flat(params)
    tensor_dtype = None if dtype is None else _float(dtype)
    kind, config = config_of(
        settings, (tensor_dtype or np.dtype(flat["embed"].dtype)).name if "embed" in flat else "float32"
    )
    table = param_mappings(kind, settings)
    if problems := _mismatches(flat, table, settings):
        raise JaxparError(*problems)
    groups: dict[str, list[ParamMapping]] = {}
    for rule in table:
        groups.setdefault(rule.tensor_name, []).append(rule)
    tensors = [
        TensorSource(
            name.format(layer),
            tensor_dtype or np.dtype(flat[group[0].path].dtype),
            tensor_shape(group),
            partial(_fetch, group, flat, layer),
        )
        for name, group in groups.items()
        for layer in (range(settings.layers) if group[0].stacked else range(1))
    ]
    check_local(folder, "folder")
    folder = Path(folder).expanduser()
    rule = "a model is exported into a folder that holds none"
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if models := [*folder.glob("*.safetensors*"), *folder.glob("config.json")]:
            raise refuse(f"{folder} holds {models[0].name}", rule=rule, fix="another folder, or empty this one")
        written = write(folder, tensors, max_file_bytes=max_file_bytes)
        config |= special_ids(Path(origin)) if origin else {}
        (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    except OSError as error:
        raise refuse(f"{folder}: {error.strerror}", rule=rule, fix="a folder that can be written, with room") from error
    return [*written, folder / "config.json", *(copy_small_files(Path(origin), folder) if origin else ())]


def _float(dtype: DTypeLike | None) -> np.dtype:
    try:
        result = jnp.dtype(dtype)
    except TypeError:
        result = None
    if result is None or result not in FLOATS:
        names = ", ".join(choice.name for choice in FLOATS)
        raise refuse(f"dtype={dtype!r:.60}", rule=f"weights are written in {names}", fix='dtype="float32"')
    return result


def _fetch(group: list[ParamMapping], flat: Mapping[str, Any], layer: int) -> np.ndarray:
    """Copies a tensor to the host in Hugging Face's layout, one layer of a stack at a time."""
    parts = [
        rule.to_tensor(np.asarray(flat[rule.path][layer] if rule.stacked else flat[rule.path][...])) for rule in group
    ]
    return parts[0] if len(parts) == 1 else np.concatenate(parts, axis=-1)


def _flat(tree: Mapping[str, Any], above: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, value in tree.items():
        flat |= _flat(value, f"{above}{key}/") if isinstance(value, Mapping) else {f"{above}{key}": value}
    return flat


def _mismatches(flat: Mapping[str, Any], table: list[ParamMapping], settings: DecoderConfig) -> list[Problem]:
    expected = {rule.path: (settings.layers, *rule.shape) if rule.stacked else rule.shape for rule in table}
    problems = shape_differences(flat, expected, owner="this decoder")
    rule, fix = "they are those of a decoder of these settings", "its own settings"
    return [Problem(f"parameters {kind}: {few(names)}", rule, fix) for kind, names in problems.items()]
