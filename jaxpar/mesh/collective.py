"""A collective of a step: the common type of the inspector and the planner, and the traffic between replicas."""

import math
from dataclasses import dataclass
from typing import Any

KINDS = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "collective-permute", "ragged-all-to-all",
         "collective-broadcast")  # fmt: skip
_WIRE = {"all-reduce": 2.0}


def wire_bytes(kind: str, payload: float, group: int) -> float:
    """Returns the bytes that each device sends in one collective, by ring algorithms.

    Source: Thakur, Rabenseifner, Gropp (2005), section 4: (n-1)/n of the payload, all-reduce twice.
    For a ragged all-to-all it is an upper bound.

    >>> wire_bytes("all-reduce", 800, 8)
    1400.0
    """
    return payload if kind == "collective-permute" else _WIRE.get(kind, 1.0) * payload * (group - 1) / group


@dataclass(frozen=True, kw_only=True)
class Collective:
    """A collective of a step, with the number of its executions.

    Attributes:
      kind: One of `KINDS`.
      axes: The mesh axes that it runs over; `~data` is a part of an axis.
      dtype: HLO's name of the dtype that devices send.
      group: Number of devices per group.
      times: Number of executions in a step; None if a loop's trip count is unknown.
      payload: Bytes per device and execution: of the full array in an all-reduce, all-gather or reduce-scatter, of the
        sent array in an all-to-all or a permute.
      senders: The share of devices that send, below 1 in an open chain of permutes.
      asynchronous: Whether other work may overlap with it.
      operation: The JAX operation that caused it.
      source: The user's line that caused it, `file.py:12`.
      cause: The parameter or activation that devices send, if known.
      loop: Trip counts of the loops around it, outermost first.
      backward: Whether it belongs to the backward pass.
      parameters: Paths of the parameters whose values or gradients devices send; several if their shapes are equal.
      count: Number of arrays that the compiler combined in it.
    """

    kind: str
    axes: tuple[str, ...]
    dtype: str
    group: int
    times: int | None
    payload: int
    senders: float = 1.0
    asynchronous: bool = False
    operation: str = ""
    source: str = ""
    cause: str = ""
    loop: tuple[int | None, ...] = ()
    backward: bool = False
    parameters: tuple[str, ...] = ()
    count: int = 1

    @property
    def wire(self) -> float:
        """Bytes that each device sends, per execution."""
        return wire_bytes(self.kind, self.payload * self.senders, self.group)

    @property
    def has_parameters(self) -> bool:
        """Whether it sends a parameter or its gradient."""
        return bool(self.parameters)

    @property
    def axis(self) -> str:
        """The axes as one word: `data,fsdp`."""
        return ",".join(self.axes)

    @property
    def step_payload(self) -> int:
        """Payload bytes of a step; of one execution if `times` is unknown."""
        return self.payload * (1 if self.times is None else self.times)

    @property
    def step_wire(self) -> float:
        """Wire bytes of a step; of one execution if `times` is unknown."""
        return self.wire * (1 if self.times is None else self.times)


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
