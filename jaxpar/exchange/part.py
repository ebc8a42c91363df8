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
    """

    shape: tuple[int, ...]
    dtype: Any
    layers: bool = False

    @property
    def size(self) -> int:
        """Elements."""
        return math.prod(self.shape)
