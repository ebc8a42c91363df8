"""A part of a parameter, as exchanges are asked about it: by its shape, before there is an array."""

import math
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Part:
    """What one device holds of a parameter.

    Attributes:
      shape: Its shape.
      dtype: As stored.
      layers: Whether dim 0 is the layers of a stack.
      whole: Elements of the parameter, on all devices.
    """

    shape: tuple[int, ...]
    dtype: Any
    layers: bool = False
    whole: int = 0

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)


def piece_dim(shape: tuple[int, ...], replicas: int) -> int | None:
    """Returns the dim in which each replica has a piece of what a device holds: the largest that divides; or None."""
    fits = [dim for dim, size in enumerate(shape) if size and size % replicas == 0]
    return max(fits, key=lambda dim: shape[dim], default=None)


def filled(elements: int, block: int) -> int:
    """Returns as many elements as whole blocks have."""
    return -(-elements // block) * block
