"""Reads a Hugging Face model: the settings in its config.json, and each parameter when and where it is placed.

Nothing is read before a parameter is indexed, and then one device's part of it: no host buffer holds the model.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError, Problem, differences
from jaxpar.models.huggingface.config import settings_of
from jaxpar.models.huggingface.folder import CONFIG, read_config
from jaxpar.models.huggingface.rules import Rule, rules, whole
from jaxpar.models.huggingface.safetensors import FLOATS, NAMES, Entry, folder_entries
from jaxpar.models.settings.decoder import DecoderSettings

PREFIXES = {"llama": "model.", "gpt2": "transformer."}
# constants that older versions saved beside the weights: causal masks, rotary frequencies
CONSTANTS = (".attn.bias", ".attn.masked_bias", ".rotary_emb.inv_freq")
HEAD = "lm_head.weight"


@dataclass(frozen=True, eq=False)
class Tensor:
    """A parameter that lies in files, read where it is indexed.

    Attributes:
      rule: How it is held.
      entries: The tensors that hold it, one for each layer of a stack.
      dtype: Dtype in which it is read.
    """

    rule: Rule
    entries: tuple[Entry, ...]
    dtype: np.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole parameter, stacked layers first."""
        return (len(self.entries), *self.rule.shape) if self.rule.stacked else self.rule.shape

    def __getitem__(self, index) -> np.ndarray:
        """Returns a part of it, of which alone memory is taken: what `jax.make_array_from_callback` asks for."""
        index = index if isinstance(index, tuple) else (index,)
        views = [self.rule.taken(entry.view()) for entry in self.entries]
        if not self.rule.stacked:
            return np.array(views[0][index], self.dtype)
        layers, rest = (index[0], index[1:]) if index and index[0] is not ... else (slice(None), index)
        chosen = np.arange(len(views))[layers]
        if not chosen.ndim:
            return np.array(views[chosen][rest], self.dtype)
        part = np.empty((len(chosen), *self.rule.taken(self.entries[0].view())[rest].shape), self.dtype)
        for at, layer in enumerate(chosen):
            part[at] = views[layer][rest]
        return part


@dataclass(frozen=True, kw_only=True)
class Pretrained:
    """A model in a folder.

    Attributes:
      kind: llama or gpt2.
      settings: Of the decoder that computes the same.
      params: Path to parameter, with `shape`, `dtype`, and `[...]`, which reads it.
    """

    kind: str
    settings: DecoderSettings
    params: Mapping[str, Tensor] = field(repr=False)


def load(folder: str | Path, *, dtype: Any = np.float32) -> Pretrained:
    """Returns the model of a folder; no number is read before a parameter is indexed.

    Args:
      folder: Has config.json and model.safetensors, or an index and its files.
      dtype: Dtype in which parameters are read; the files have 16 or 32 bits.

    Raises:
      JaxparError: With every key of the config that the decoder does not know or cannot do, or every tensor that is
        missing, unexpected, of another shape or no float; or if a file is damaged.
    """
    folder = Path(folder).expanduser()
    kind, settings = settings_of(read_config(folder / CONFIG))
    table = rules(kind, settings)
    held = _prefixed(folder_entries(folder), PREFIXES[kind])
    if problems := _differences(held, table, settings):
        raise JaxparError(*problems)
    layers = {True: range(settings.layers), False: range(1)}
    entries = {rule.ours: tuple(held[rule.theirs.format(i)] for i in layers[rule.stacked]) for rule in table}
    return Pretrained(
        kind=kind,
        settings=settings,
        params={rule.ours: Tensor(rule, entries[rule.ours], np.dtype(dtype)) for rule in table},
    )


def _prefixed(held: Mapping[str, Entry], prefix: str) -> dict[str, Entry]:
    """Returns tensors by full name: a model saved without its head names none of its parts `model.`."""
    bare = not any(name.startswith(prefix) for name in held)
    return {
        prefix + name if bare and name != HEAD else name: entry
        for name, entry in held.items()
        if not name.endswith(CONSTANTS)
    }


def _differences(held: Mapping[str, Entry], table: list[Rule], settings: DecoderSettings) -> list[Problem]:
    """Returns which tensors are missing, unexpected, of another shape, or no floats: each by name."""
    if settings.layers > len(held):
        return [
            Problem(f"{settings.layers} layers, {len(held)} tensors", "each layer has its tensors", "fetch it again")
        ]
    wanted: dict[str, tuple[int, ...]] = {}
    for rule in table:
        for layer in range(settings.layers) if rule.stacked else range(1):
            wanted[rule.theirs.format(layer)] = whole([rule])
    if settings.tied and HEAD in held and HEAD not in wanted and _same(held[HEAD], held.get(table[0].theirs)):
        held = {name: entry for name, entry in held.items() if name != HEAD}  # saved twice
    found = differences(held, wanted, of="this model")
    found["in numbers that are not read"] = [
        f"{name} {NAMES[held[name].dtype]}" for name in wanted if name in held and held[name].dtype not in FLOATS
    ]
    rule = "a model's files hold the tensors that its config.json says, in F32, F16 or BF16"
    fix = "the config.json that belongs to these files"
    return [Problem(f"{what}: {few(names)}", rule, fix) for what, names in found.items() if names]


def _same(one: Entry, other: Entry | None) -> bool:
    if other is None or (one.shape, one.dtype) != (other.shape, other.dtype):
        return False
    a, b = one.view(), other.view()
    return all(np.array_equal(a[i : i + 1024], b[i : i + 1024]) for i in range(0, len(a), 1024))


def few(names: list[str]) -> str:
    return ", ".join(names[:40]) + (f" and {len(names) - 40} more" if len(names) > 40 else "")
