"""A device's part of a parameter, by shape: exchanges plan with it before there is an array."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class ShardShape:
    """The part of a parameter that one device holds.

    Attributes:
      shape: Its shape.
      dtype: As stored.
      layers: Whether dim 0 is the layers of a stack.
      total_size: Elements of the parameter, on all devices.
    """

    shape: tuple[int, ...]
    dtype: Any
    layers: bool = False
    total_size: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def piece_dim(shape: tuple[int, ...], replicas: int) -> int | None:
    """Returns the dim along which each replica has a piece of a device's part: the largest that divides; or None."""
    candidates = [dim for dim, size in enumerate(shape) if size and size % replicas == 0]
    return max(candidates, key=lambda dim: shape[dim], default=None)


def round_up(elements: int, block: int) -> int:
    """Rounds a number of elements up to whole blocks."""
    return -(-elements // block) * block
