"""Traffic between replicas, as collectives of the ledger."""

import math
from dataclasses import dataclass
from typing import Any

from jaxpar.mesh.collective import Collective


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A collective between replicas, and how often it runs.

    Attributes:
      collective: The collective, as it runs in one step.
      every: Number of steps from one run to the next.
      sync_round: Number of the exchange's sync round that runs it, from 1.
    """

    collective: Collective
    every: int = 1
    sync_round: int = 1


# A device's part of a parameter, by shape: exchanges plan with it before there is an array.


@dataclass(frozen=True, slots=True)
class ShardShape:
    """The part of a parameter that one device holds.

    Attributes:
      shape: Shape of the part.
      dtype: Stored dtype.
      layers: Whether dim 0 is the layers of a stack.
      total_size: Number of elements of the parameter, on all devices together.
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
    """Returns the dim along which replicas divide a device's part: the largest that they divide evenly, or None."""
    candidates = [dim for dim, size in enumerate(shape) if size and size % replicas == 0]
    return max(candidates, key=lambda dim: shape[dim], default=None)


def round_up(elements: int, block: int) -> int:
    """Rounds a number of elements up to a multiple of the block."""
    return -(-elements // block) * block
