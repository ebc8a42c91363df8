"""How `context` and `tensor` split a model that is no decoder: their traffic; work and arrays are traced.

An integer program on the model's trace finds them (`jaxpar.specs`); a plan only prices them.
"""

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxpar.plan.candidate import Candidate

AXES = ("context", "tensor")  # whose dims are found, outermost first: a split's sizes are in this order
Sizes = tuple[int, int]


@dataclass(frozen=True, kw_only=True)
class SplitTraffic:
    """Equal collectives over an axis.

    Attributes:
      axis: "context" or "tensor".
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      payload_per_row: Bytes of one collective for each example of a microbatch.
      payload: Bytes of one collective that do not depend on the examples.
      times: Number of them for a microbatch.
      is_recomputed: Whether recomputation of activations runs them again.
      backward: Whether the backward pass runs them.
    """

    axis: str
    kind: str
    payload_per_row: float
    payload: float
    times: float
    is_recomputed: bool = False
    backward: bool = False


@dataclass(frozen=True, kw_only=True)
class ModelSplit:
    """A model that is split by `context` and `tensor` of given sizes.

    Attributes:
      traffic: Collectives over these axes.
    """

    traffic: tuple[SplitTraffic, ...] = ()


class SplitsModel(Protocol):
    """A model with a split for each pair of sizes of `context` and `tensor` that it supports."""

    @property
    def splits(self) -> Mapping[Sizes, ModelSplit]:
        """Maps sizes of (context, tensor) to the split; (1, 1) has no entry."""
        ...


def split_sizes(splits: Iterable[Sizes], axis: str) -> list[int]:
    """Returns the sizes of an axis for which the model has a split, and 1, in ascending order."""
    return sorted({1, *(sizes[AXES.index(axis)] for sizes in splits)})


def traffic(model: SplitsModel, candidate: Candidate, axis: str) -> Iterator[tuple[SplitTraffic, Any, Any]]:
    """Yields (traffic, payload, count) of a microbatch's collectives over an axis; the count is 0 for other sizes."""
    for (context, tensor), split in model.splits.items():
        active = np.equal(candidate.context, context) & np.equal(candidate.tensor, tensor)
        for entry in split.traffic:
            if entry.axis == axis:
                payload = entry.payload + entry.payload_per_row * candidate.microbatch
                again = entry.is_recomputed & np.not_equal(candidate.remat, "none")
                yield entry, payload, entry.times * active * (1 + again)
