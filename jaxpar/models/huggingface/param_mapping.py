"""Maps tensors of Hugging Face to parameters of a decoder: one table per family, used in both directions.

    ours                       dims     theirs                                    dims
    blocks/attention/query     d h k    model.layers.{}.self_attn.q_proj.weight   hk d

The tables, and the letters of dims: `tensors.py`. Both codes rotate pairs (i, i + n), so rotary weights need no
permutation.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

import numpy as np

from jaxpar.models.huggingface.tensors import TABLES
from jaxpar.models.settings.decoder import DecoderConfig


@dataclass(frozen=True, kw_only=True)
class ParamMapping:
    """One parameter, and the Hugging Face tensors that store it.

    Attributes:
      path: Path of the parameter.
      dims: Its dims in one tensor, by letter.
      tensor_name: Name of the tensor, `{}` for the layer, and a second one for the expert.
      tensor_dims: The tensor's dims, each of one or more letters.
      part: The range of the concatenated dim that stores this parameter.
      joint: The letter of the concatenated dim; "" if the tensor stores this parameter alone.
      stacked: Sizes of the parameter's leading dims, of which each entry has its own tensor: layers, experts.
      sizes: Letter to size.
      padding: Zeros after the vocabulary in the parameter, which no tensor has.
    """

    path: str
    dims: str
    tensor_name: str
    tensor_dims: tuple[str, ...]
    part: slice
    joint: str
    stacked: tuple[int, ...]
    sizes: Mapping[str, int] = field(repr=False)
    padding: int = 0

    @property
    def padded_dim(self) -> int:
        """The dim of the parameter in one tensor that has the padding."""
        return self.dims.index("v")

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the whole parameter, stacked dims first."""
        sizes = (self.sizes[letter] + self.padding * (letter == "v") for letter in self.dims)
        return (*self.stacked, *sizes)

    @property
    def joint_dim(self) -> int:
        """The position of the concatenated dim among single letters; 0 without one."""
        return max(0, "".join(self.tensor_dims).find(self.joint)) if self.joint else 0

    def to_param(self, tensor: np.ndarray, total: int) -> np.ndarray:
        """Returns the parameter of one tensor as a view; `total` is the size of the tensor's concatenated dim."""
        letters = "".join(self.tensor_dims)
        view = tensor.reshape([total if letter == self.joint else self.sizes[letter] for letter in letters])
        if self.joint:
            view = view[(slice(None),) * self.joint_dim + (self.part,)]
        return view.transpose([letters.index(letter) for letter in self.dims])

    def to_tensor(self, value: np.ndarray) -> np.ndarray:
        """Transposes the parameter of one tensor to the tensor's order, one dim per letter; cuts the padding off."""
        if self.padding:
            value = value[(slice(None),) * self.padded_dim + (slice(self.sizes["v"]),)]
        return value.transpose([self.dims.index(letter) for letter in "".join(self.tensor_dims)])


def param_mappings(kind: str, settings: DecoderConfig) -> list[ParamMapping]:
    """One rule per parameter of a decoder."""
    s, e = settings, settings.experts
    sizes = {
        "v": s.vocab, "s": s.seq, "d": s.dim, "h": s.heads, "g": s.kv_heads or s.heads, "k": s.head_width, "f": s.width,
        "e": e.count, "m": e.hidden or s.width,
    }  # fmt: skip
    result, ends = [], {}
    for line in TABLES[kind].strip().splitlines():
        if not line.strip():
            continue
        ours, dims, theirs, flat = (cell.split() for cell in re.split(r" {2,}", line.strip()))
        path, name, places = ours[0], theirs[0], theirs[0].count("{}")
        if not _exists(path, settings):
            continue
        joint = next((word[word.index("+") - 1] for word in flat if "+" in word), "")
        start = ends.get(name, 0)
        ends[name] = start + (sizes[joint] if joint else 0)
        letters = "".join(dims)
        result.append(
            ParamMapping(
                path=path, dims=letters[1:] if places == 2 else letters, tensor_name=name,
                tensor_dims=tuple(word.replace("+", "") for word in flat), part=slice(start, ends[name]), joint=joint,
                stacked=(s.layers, e.count)[:places], sizes=sizes,
                padding=s.vocab_rows - s.vocab if "v" in letters else 0,
            )
        )  # fmt: skip
    return result


def _exists(path: str, settings: DecoderConfig) -> bool:
    """Whether a decoder of these settings has a parameter."""
    if path == "head":
        return not settings.tied
    if not path.endswith("_bias"):
        return True
    part = "mlp" if "/mlp/" in path else "out" if path.endswith("out_bias") else "qkv"
    return part in settings.biased_parts and (settings.gated or not path.endswith("gate_bias"))


def joint_size(group: list[ParamMapping]) -> int:
    """Size of the dim along which these rules, which share a tensor, are concatenated."""
    return group[-1].part.stop


def tensor_shape(group: list[ParamMapping]) -> tuple[int, ...]:
    """Shape of the tensor that these rules share."""
    last, total = group[-1], joint_size(group)
    return tuple(
        math.prod(total if letter == last.joint else last.sizes[letter] for letter in letters)
        for letters in last.tensor_dims
    )


def to_tensor(group: list[ParamMapping], values: list[np.ndarray]) -> np.ndarray:
    """Returns the tensor that these rules share, of their parameters in it."""
    parts = [rule.to_tensor(value) for rule, value in zip(group, values, strict=True)]
    joined = parts[0] if len(parts) == 1 else np.concatenate(parts, axis=group[0].joint_dim)
    return joined.reshape(tensor_shape(group))


def groups(table: list[ParamMapping]) -> dict[str, list[ParamMapping]]:
    """Returns the rules by the name of their tensor."""
    result: dict[str, list[ParamMapping]] = {}
    for rule in table:
        result.setdefault(rule.tensor_name, []).append(rule)
    return result
