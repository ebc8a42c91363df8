"""Reads a Hugging Face model: the settings in its config.json, and each parameter when it is placed on devices.

Indexing a parameter reads only that part of the files, such as one device's shard: no host buffer holds the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError, Problem, shape_differences
from jaxpar.models.huggingface.config import read_settings
from jaxpar.models.huggingface.families import FAMILIES
from jaxpar.models.huggingface.folder import CONFIG, read_config
from jaxpar.models.huggingface.param_mapping import ParamMapping, groups, joint_size, param_mappings, tensor_shape
from jaxpar.models.huggingface.safetensors import FLOATS, NAMES, Entry, folder_entries
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
