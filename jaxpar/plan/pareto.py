"""The Pareto front of time and memory: layouts that no other layout beats in both (Pareto 1906).

By time: each further layout of the front is slower, and needs less memory, than all before it.
"""

from dataclasses import dataclass

import numpy as np

from jaxpar.plan.candidate import Candidate


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """All compared layouts that fit, as arrays [layouts]; all numbers are modelled.

    Attributes:
      layouts: The layouts.
      seconds: Seconds of a step.
      bytes: Bytes of the fullest device.
    """

    layouts: Candidate
    seconds: np.ndarray
    bytes: np.ndarray

    @property
    def pareto(self) -> np.ndarray:
        """Indices of the Pareto front, fastest first."""
        return pareto(self.seconds, self.bytes)

    def fastest_below(self, limits: np.ndarray) -> np.ndarray:
        """Returns the indices of the fastest layout below each limit of bytes, without duplicates."""
        front = self.pareto
        count = np.searchsorted(-self.bytes[front], -np.asarray(limits), side="left")
        return front[np.unique(count[count < len(front)])]


def pareto(seconds: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Returns the indices of the Pareto front, fastest first; of equal points, the first.

    >>> pareto(np.array([1.0, 2.0, 3.0, 2.5]), np.array([9, 4, 4, 5])).tolist()
    [0, 1]
    """
    order = np.lexsort((needed, seconds))
    lowest = np.minimum.accumulate(needed[order])
    return order[np.concatenate([[True], lowest[1:] < lowest[:-1]])[: len(order)]]
