"""Time against memory: which layouts need less of one only for more of the other.

pareto   the front, by time: each further one is slower and needs less memory than all before it (Pareto 1906)
"""

from dataclasses import dataclass

import numpy as np

from jaxpar.plan.candidate import Candidate


@dataclass(frozen=True, kw_only=True, eq=False)
class Points:
    """Every layout that fits, as arrays with one element for each; all numbers are modelled.

    Attributes:
      layouts: What they are.
      seconds: Of a step.
      bytes: Of the fullest device.
    """

    layouts: Candidate
    seconds: np.ndarray
    bytes: np.ndarray

    @property
    def pareto(self) -> np.ndarray:
        """Indices of the layouts that no other one beats in both, fastest first."""
        return pareto(self.seconds, self.bytes)

    def under(self, limits: np.ndarray) -> np.ndarray:
        """Returns the indices of the fastest layouts that need at most so many bytes, each once."""
        best = self.pareto
        count = np.searchsorted(-self.bytes[best], -np.asarray(limits), side="left")
        return best[np.unique(count[count < len(best)])]


def pareto(seconds: np.ndarray, needed: np.ndarray) -> np.ndarray:
    """Returns the indices of what nothing beats in both, fastest first; of equals, the first.

    >>> pareto(np.array([1.0, 2.0, 3.0, 2.5]), np.array([9, 4, 4, 5])).tolist()
    [0, 1]
    """
    order = np.lexsort((needed, seconds))
    least = np.minimum.accumulate(needed[order])
    return order[np.concatenate([[True], least[1:] < least[:-1]])[: len(order)]]
