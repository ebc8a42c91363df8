"""Mixes the examples of several sets by weight: the position of an example alone decides its set.

    weights 0.7, 0.3     a a b a a b a a a b | a a b ...        7,000 of 10,000 positions are a's, evenly spread

An exhausted set begins a new epoch, in a new order, while the others go on.
"""

from collections.abc import Sequence

import numpy as np

from jaxpar.data.examples import Examples
from jaxpar.data.held_out import weighted_batches
from jaxpar.data.spec import Batch, Rows, WeightedBatch, select_rows
from jaxpar.errors import refuse

ROUND = 10_000  # period of the pattern of sets, in positions


class Mixture:
    """Several sets as one source.

    Args:
      sets: The sets, each with its own order and held-out examples.
      weights: Relative frequency of each set.

    Raises:
      JaxparError: If a weight is so small that its set would never be drawn.
    """

    def __init__(self, sets: Sequence[Examples], weights: Sequence[float]):
        self.sets, shares = sets, np.array(weights) / sum(weights)
        self.counts = np.floor(shares * ROUND).astype(int)
        largest_remainders = np.argsort(self.counts - shares * ROUND, kind="stable")[: ROUND - self.counts.sum()]
        self.counts[largest_remainders] += 1
        if not self.counts.all():
            raise refuse(
                f"data.weights = {list(weights)}",
                rule=f"every set is drawn at least once in {ROUND} examples",
                fix="larger weights, or without that entry of data.path",
            )
        # example k of a set that is drawn n times in a round is placed at the fraction (k + 1/2) / n of the round
        fractions = np.concatenate([(np.arange(count) + 0.5) / count for count in self.counts])
        order = np.argsort(fractions, kind="stable")
        self.pattern = np.repeat(np.arange(len(sets)), self.counts)[order]
        self.ranks = np.concatenate([np.arange(count) for count in self.counts])[order]

    @property
    def fingerprint(self) -> str:
        """The fingerprints of all sets, joined by +."""
        return "+".join(str(getattr(source, "fingerprint", "")) for source in self.sets)

    @property
    def examples(self) -> int:
        """Number of training examples in all sets."""
        return sum(source.examples for source in self.sets)

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        positions = np.arange(step * size, (step + 1) * size)[slice(None) if rows is None else rows]
        owners, inner = self._locate(positions)
        parts = {owner: self.sets[owner].at_positions(inner[owners == owner]) for owner in np.unique(owners).tolist()}
        batch: Batch = {}
        for owner, part in parts.items():
            for name, value in part.items():
                array = batch.setdefault(name, np.empty((len(positions), *value.shape[1:]), value.dtype))
                array[owners == owner] = value
        return batch

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        owners, inner = self._locate(np.array([step * size + row]))
        return self.sets[owners[0]].where(int(inner[0]), 1, 0)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` held-out examples, one set after the other; none after the last."""
        ends = np.cumsum([len(owner.held_out_indices) for owner in self.sets])
        chosen = np.arange(index * size, min((index + 1) * size, int(ends[-1])))
        if not len(chosen):
            return []
        owners = np.searchsorted(ends, chosen, side="right")
        begins = np.concatenate([[0], ends[:-1]])
        parts = [
            self.sets[owner].held_out_examples(chosen[owners == owner] - begins[owner])
            for owner in np.unique(owners).tolist()
        ]
        batch = {name: np.concatenate([part[name] for part in parts]) for name in parts[0]}
        return weighted_batches(len(chosen), size, rows, lambda indices: select_rows(batch, indices))

    def _locate(self, positions: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Returns the index of each position's set, and the position within that set."""
        rounds, places = positions // ROUND, positions % ROUND
        owners = self.pattern[places]
        return owners, rounds * self.counts[owners] + self.ranks[places]
