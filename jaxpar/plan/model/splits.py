"""How the tensor axis splits a model that is no decoder: its traffic for each size; work and arrays are traced.

An integer program on the model's trace finds them (`jaxpar.specs`); a plan only prices them.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from jaxpar.plan.candidate import Candidate


@dataclass(frozen=True, kw_only=True)
class SplitTraffic:
    """Equal collectives over the tensor axis.

    Attributes:
      kind: all-gather, reduce-scatter, all-reduce or all-to-all.
      payload_per_row: Bytes of one for each example of a microbatch.
      payload: Bytes of one, whatever the examples.
      times: Number of them for a microbatch.
    """

    kind: str
    payload_per_row: float
    payload: float
    times: float


@dataclass(frozen=True, kw_only=True)
class TensorSplit:
    """A model over a tensor axis of one size.

    Attributes:
      traffic: Collectives over the axis.
    """

    traffic: tuple[SplitTraffic, ...] = ()


class TensorSplitModel(Protocol):
    """A model with a split for each size of the tensor axis that it supports."""

    @property
    def splits(self) -> Mapping[int, TensorSplit]:
        """Sizes of the axis to the split; 1 is not among them."""
        ...


def traffic(model: TensorSplitModel, candidate: Candidate) -> Iterator[tuple[str, Any, Any]]:
    """Yields the kind, payload and count of the collectives of a microbatch; 0 of those of other sizes."""
    for size, split in model.splits.items():
        for each in split.traffic:
            payload = each.payload + each.payload_per_row * candidate.microbatch
            yield each.kind, payload, each.times * np.equal(candidate.tensor, size)
