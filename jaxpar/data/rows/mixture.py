"""Examples of several sets, mixed by weights: which set an example comes from depends on its position alone.

    weights 0.7, 0.3     a a b a a b a a a b | a a b ...        of 10,000 positions 7,000 are of a, evenly spread

A set that is used up begins a new epoch, in a new order, while the others go on.
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.data.examples import Examples
from jaxpar.data.held_out import weighted
from jaxpar.data.spec import Batch, Rows, Weighted, some
from jaxpar.errors import refuse

ROUND = 10_000  # positions after which the pattern of sets begins anew


class Mixture:
    """Several sets as one source.

    Args:
      sets: The sets, each with its own order and examples held out.
      weights: What each is drawn by.

    Raises:
      JaxparError: If a weight is so small that its set would never be drawn.
    """

    def __init__(self, sets: Sequence[Examples], weights: Sequence[float]):
        self.sets, shares = sets, np.array(weights) / sum(weights)
        self.counts = np.floor(shares * ROUND).astype(int)
        rest = np.argsort(self.counts - shares * ROUND, kind="stable")[: ROUND - self.counts.sum()]
        self.counts[rest] += 1
        if not self.counts.all():
            raise refuse(
                f"data.weights = {list(weights)}",
                rule=f"every set is drawn at least once in {ROUND} examples",
                fix="larger weights, or without that entry of data.path",
            )
        # example k of a set that is drawn n times in a round stands at (k + 1/2) / n of it
        stands = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        order = np.argsort(stands, kind="stable")
        self.pattern = np.repeat(np.arange(len(sets)), self.counts)[order]
        self.ranks = np.concatenate([np.arange(count) for count in self.counts])[order]

    @property
    def fingerprint(self) -> str:
        """Tells the sets from others."""
        return "+".join(str(getattr(each, "fingerprint", "")) for each in self.sets)

    @property
    def examples(self) -> int:
        """How many there are to train on, in all sets."""
        return sum(each.examples for each in self.sets)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        positions = np.arange(step * size, (step + 1) * size)[slice(None) if rows is None else rows]
        of, inner = self._of(positions)
        parts = {index: self.sets[index].at(inner[of == index]) for index in np.unique(of).tolist()}
        made: Batch = {}
        for index, part in parts.items():
            for name, value in part.items():
                whole = made.setdefault(name, np.empty((len(positions), *value.shape[1:]), value.dtype))
                whole[of == index] = value
        return made

    def where(self, step: int, size: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        of, inner = self._of(np.array([step * size + row]))
        return self.sets[of[0]].where(int(inner[0]), 1, 0)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` held-out examples of all sets, one set after the other; none after the last."""
        ends = np.cumsum([len(each.out) for each in self.sets])
        chosen = np.arange(index * size, min((index + 1) * size, int(ends[-1])))
        if not len(chosen):
            return []
        of = np.searchsorted(ends, chosen, side="right")
        begins = np.concatenate([[0], ends[:-1]])
        parts = [self.sets[each].held(chosen[of == each] - begins[each]) for each in np.unique(of).tolist()]
        whole = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return weighted(len(chosen), size, rows, lambda at: some(whole, at))

    def _of(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the set of each position, and the position within it."""
        rounds, places = positions // ROUND, positions % ROUND
        of = self.pattern[places]
        return of, rounds * self.counts[of] + self.ranks[places]
