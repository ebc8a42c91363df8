"""Reads and writes the weights of a Hugging Face model, with the settings in its config.json.

Reading: each parameter is read when it is placed on devices. Indexing a parameter reads only that part of the files,
such as one device's shard: no host buffer holds the model. Writing: one tensor at a time.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from jaxpar.errors import JaxparError, Problem, refuse, shape_differences
from jaxpar.files import check_local
from jaxpar.models.huggingface.config import make_config, read_settings
from jaxpar.models.huggingface.families import FAMILIES
from jaxpar.models.huggingface.folder import CONFIG, check_links, copy_small_files, is_folder, read_config, special_ids
from jaxpar.models.huggingface.param_mapping import (
    ParamMapping,
    groups,
    joint_size,
    param_mappings,
    tensor_shape,
    to_tensor,
)
from jaxpar.models.huggingface.safetensors import FLOATS, NAMES, Entry, TensorSource, folder_entries, write
from jaxpar.models.settings.decoder import DecoderConfig

HEAD = "lm_head.weight"  # saved beside the embedding that it is tied to
# constants that older versions saved with the weights: causal masks, rotary frequencies
CONSTANTS = (
    ".attn.bias", ".attn.masked_bias", ".attention.bias", ".attention.masked_bias", ".rotary_emb.inv_freq",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class Tensor:
    """A parameter in files, read when it is indexed.

    Attributes:
      rule: Mapping to Hugging Face's tensors.
      entries: The tensors, one per layer of a stack, and per expert. Shape `rule.stacked`, of `Entry`.
      joint_size: Size of the dim of a tensor that several parameters share.
      dtype: Dtype that the values are converted to.
    """

    rule: ParamMapping
    entries: np.ndarray
    joint_size: int
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, stacked dims first."""
        return self.rule.shape

    def __getitem__(self, index) -> np.ndarray:
        """Reads a part and allocates only this part, for `jax.make_array_from_callback`."""
        index = index if isinstance(index, tuple) else (index,)
        index, stacked = tuple(entry for entry in index if entry is not ...), self.entries.ndim
        inner = index[stacked:]
        selection: Any = self.entries[index[:stacked]]
        if isinstance(selection, Entry):
            return self._padded(self._view(selection), inner)
        part = np.empty((*selection.shape, *self._view(self.entries.flat[0])[inner].shape), self.dtype)
        for place in np.ndindex(selection.shape):
            part[place] = self._view(selection[place])[inner]
        return part

    def _padded(self, view: np.ndarray, index: tuple) -> np.ndarray:
        """Reads a part of a parameter that may have zeros after the vocabulary."""
        rule = self.rule
        if not rule.padding:
            return np.array(view[index], self.dtype)
        dim = rule.padded_dim
        index = tuple(index) + (slice(None),) * (len(rule.dims) - len(index))
        first, last, _ = index[dim].indices(rule.sizes["v"] + rule.padding)
        cut = slice(min(first, rule.sizes["v"]), min(last, rule.sizes["v"]))
        part = np.array(view[(*index[:dim], cut, *index[dim + 1 :])], self.dtype)
        missing = (last - first) - (cut.stop - cut.start)
        return np.pad(part, [(0, missing if axis == dim else 0) for axis in range(part.ndim)])

    def _view(self, entry: Entry) -> np.ndarray:
        return self.rule.to_param(entry.view(), self.joint_size)


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A Hugging Face model.

    Attributes:
      kind: Its family, a key of `families.FAMILIES`.
      settings: Settings of the decoder that computes the same function.
      params: Path to parameter, with `shape` and `dtype`; indexing with `[...]` reads it.
    """

    kind: str
    settings: DecoderConfig
    params: Mapping[str, Tensor] = field(repr=False)


def load(folder: str | Path, *, dtype: Any = np.float32, padded_vocab: int = 0) -> Pretrained:
    """Opens the model of a folder; values are read only when a parameter is indexed.

    Args:
      folder: Folder with config.json and model.safetensors, or with an index and its files.
      dtype: Dtype that the parameters are converted to; the files have 16 or 32 bits.
      padded_vocab: The setting of that name, which the folder does not have.

    Raises:
      JaxparError: If the decoder does not know or support a key of the config, a tensor is missing, unexpected, of
        another shape or not a float, or a file is damaged; the message lists all such keys or tensors.
    """
    folder = Path(folder).expanduser()
    kind, settings = read_settings(read_config(folder / CONFIG))
    settings = replace(settings, padded_vocab=padded_vocab)
    table = param_mappings(kind, settings)
    tensors = _add_prefix(folder_entries(folder), FAMILIES[kind].prefix, {rule.tensor_name for rule in table})
    if problems := _tensor_problems(tensors, table, settings):
        raise JaxparError(*problems)
    sizes = {name: joint_size(group) for name, group in groups(table).items()}
    return Pretrained(
        kind=kind,
        settings=settings,
        params={
            rule.path: Tensor(rule, find_entries(rule, tensors), sizes[rule.tensor_name], np.dtype(dtype))
            for rule in table
        },
    )


def find_entries(rule: ParamMapping, tensors: Mapping[str, Entry]) -> np.ndarray:
    """Returns the entries of a parameter by the full names of tensors. Shape `rule.stacked`, of objects."""
    entries = np.empty(rule.stacked, object)
    for place in np.ndindex(rule.stacked):
        entries[place] = tensors[rule.tensor_name.format(*place)]
    return entries


def _add_prefix(tensors: Mapping[str, Entry], prefix: str, names: set[str]) -> dict[str, Entry]:
    """Adds the prefix, e.g. `model.`, to the names of a model that was saved without its head."""
    is_unprefixed = not any(name.startswith(prefix) for name in tensors)
    return {
        prefix + name if is_unprefixed and name not in names | {HEAD} else name: entry
        for name, entry in tensors.items()
        if not name.endswith(CONSTANTS)
    }


def _tensor_problems(tensors: Mapping[str, Entry], table: list[ParamMapping], settings: DecoderConfig) -> list[Problem]:
    """Reports the names of tensors that are missing, unexpected, of another shape, or not floats."""
    if settings.layers > len(tensors):
        return [
            Problem(f"{settings.layers} layers, {len(tensors)} tensors", "each layer has its tensors", "fetch it again")
        ]
    expected: dict[str, tuple[int, ...]] = {}
    for name, group in groups(table).items():
        for place in np.ndindex(group[0].stacked):
            expected[name.format(*place)] = tensor_shape(group)
    if (
        settings.tied
        and HEAD in tensors
        and HEAD not in expected
        and _is_equal(tensors[HEAD], tensors.get(table[0].tensor_name))
    ):
        tensors = {name: entry for name, entry in tensors.items() if name != HEAD}  # saved twice
    differing = shape_differences(tensors, expected, owner="this model")
    differing["in numbers that are not read"] = [
        f"{name} {NAMES[tensors[name].dtype]}"
        for name in expected
        if name in tensors and tensors[name].dtype not in FLOATS
    ]
    rule = "a model's files hold the tensors that its config.json says, in F32, F16 or BF16"
    fix = "the config.json that belongs to these files"
    return [Problem(f"{kind}: {shorten(names)}", rule, fix) for kind, names in differing.items() if names]


def _is_equal(first: Entry, second: Entry | None) -> bool:
    if second is None or (first.shape, first.dtype) != (second.shape, second.dtype):
        return False
    a, b = first.view(), second.view()
    return all(np.array_equal(a[i : i + 1024], b[i : i + 1024]) for i in range(0, len(a), 1024))


def shorten(names: list[str]) -> str:
    return ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")


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
    rule, fix = "the parameters must fit the decoder's settings", "the settings of the model that has these parameters"
    return [Problem(f"parameters {kind}: {shorten(names)}", rule, fix) for kind, names in problems.items()]
