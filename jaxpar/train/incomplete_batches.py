"""Evaluation of an incomplete last batch of held-out examples, such that each example counts exactly once.

    F  the examples, padded to a full batch with copies of one    A  some rows of F; the other rows are copies from C
    C  a batch of copies of that one example                      B  the other rows of F; the rest are copies from C

    F + C == A + B    the loss is additive over examples: the sums of the copies are subtracted, no program is compiled
    F + C != A + B    the loss of an example depends on the other examples (contrastive losses, rankings, counts clipped
                      to at least 1): the examples are evaluated as a smaller batch. Examples beyond the largest
                      multiple that the mesh divides are left out, which the run reports

Each evaluation checks its first incomplete batch again; every other incomplete batch is checked once per run.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

import jax
import numpy as np

from jaxpar.data.spec import WeightedBatch
from jaxpar.parallel.layout import Layout

Totals = dict[str, tuple[float, float]]
Sums = Callable[[Mapping[str, Any]], Totals]
Evaluate = Callable[[Mapping[str, Any]], Mapping[str, tuple[Any, Any]]]
SAME = 1e-4  # tolerance, relative to the largest of four sums; reordering a float32 sum changes it by far less


class HeldOut(Protocol):
    """The held-out batches of one set; `Feed` implements it."""

    layout: Layout
    size: int

    def evaluation(self, index: int) -> list[WeightedBatch]:
        """Returns the index-th batch as weighted batches; an empty list after the last."""
        ...

    def rearrange(self, index: int, rows: np.ndarray) -> Mapping[str, Any]:
        """Returns the given rows of the index-th batch, as a batch of `len(rows)` examples."""
        ...


@dataclass
class Incomplete:
    """Evaluates the incomplete batches of one set.

    Attributes:
      name: Name of the set; "" for the examples that the source holds out.
      adds_up: Whether sums and counts are additive over examples, as far as the checks have shown.
      checked: Indices of the checked batches.
      counts: Maps a loss entry to the distinct counts seen in full batches, at most two; only 1 if it is a mean.
      noted_sizes: Sizes of the smaller batches that the run has reported.
    """

    name: str = ""
    adds_up: bool = True
    checked: set[int] = field(default_factory=set)
    counts: dict[str, set[float]] = field(default_factory=dict)
    noted_sizes: set[int] = field(default_factory=set)

    def totals(
        self, feed: HeldOut, index: int, evaluate: Evaluate, *, first: bool, draws: bool, say: Callable[[str], None]
    ) -> tuple[Totals, bool] | None:
        """Evaluates the index-th batch of held-out examples.

        Args:
          feed: The batches.
          index: Index of the batch.
          evaluate: Batch to its sums and counts.
          first: Whether no incomplete batch came earlier in this evaluation.
          draws: Whether the loss draws random numbers per row.
          say: Prints a line for the user if the examples are evaluated as a smaller batch or left out.

        Returns:
          The sums and counts, and whether the batch was incomplete; None after the last batch.
        """

        def sums(batch: Mapping[str, object]) -> Totals:
            metrics = jax.device_get(evaluate(batch))
            return {name: (float(total), float(count)) for name, (total, count) in metrics.items()}

        batches = feed.evaluation(index)
        if not batches:
            return None
        count = batches[0].examples
        if count and not self.adds_up:
            return self._evaluate_smaller(feed, index, count, sums, say), True
        parts = [sums(item.batch) for item in batches]
        if count and (first or (count > 1 and index not in self.checked)):
            self.checked.add(index)
            self.adds_up = _is_additive(feed, index, count, sums, draws=draws)
            if not self.adds_up:
                return self._evaluate_smaller(feed, index, count, sums, say), True
        if not count:
            for name, (_, number) in parts[0].items():
                counts = self.counts.setdefault(name, set())
                if len(counts) < 2:
                    counts.add(number)
        totals = weighted_totals([(item.weight, part) for item, part in zip(batches, parts, strict=True)])
        return totals, bool(count)

    def _evaluate_smaller(self, feed: HeldOut, index: int, count: int, sums: Sums, say: Callable) -> Totals:
        """Evaluates the examples as a smaller batch without copies; returns its sums and counts."""
        divisor = feed.layout.replicas * feed.layout.microbatches
        fit = count // divisor * divisor
        if count not in self.noted_sizes:
            self.noted_sizes.add(count)
            say(_message(self.name, count, fit, divisor))
        if not fit:
            return {}
        totals = sums(feed.rearrange(index, np.arange(fit)))
        # a mean has the same count in every batch: weight it by the examples that it averages
        share = {name: fit / feed.size if self.counts.get(name) == {pair[1]} else 1.0 for name, pair in totals.items()}
        return {name: (share[name] * total, share[name] * number) for name, (total, number) in totals.items()}


def weighted_totals(parts: list[tuple[float, Totals]]) -> Totals:
    """Adds up sums and counts, each part multiplied by its weight."""
    totals: Totals = {}
    for weight, part in parts:
        for name, (total, count) in part.items():
            previous = totals.get(name, (0.0, 0.0))
            totals[name] = (previous[0] + weight * total, previous[1] + weight * count)
    return totals


def _is_additive(feed: HeldOut, index: int, count: int, sums: Sums, *, draws: bool) -> bool:
    """Returns whether sums and counts are additive over examples.

    Args:
      feed: The batches.
      index: Index of a padded batch.
      count: Its examples without the copies.
      sums: Batch to its sums and counts.
      draws: Whether the loss of an example depends on its row, because it draws random numbers.
    """
    size = feed.size
    if count == 1 and index:  # copies of a single example cannot show interactions: use the full batch before
        index, count = index - 1, size
    rows = np.arange(size)
    others = np.flatnonzero((rows < size // count * count) & (rows % count > 0))
    if len(others) < 2:
        return _is_proportional(feed, index, sums)
    first = np.isin(rows, others[::2])
    order = rows if draws else np.random.default_rng(0).permutation(size)  # expert capacity favors early rows
    mixed = (np.where(first, rows, 0)[order], np.where(first, 0, rows)[order])
    filled, copies, a, b = (sums(feed.rearrange(index, which)) for which in (rows, np.zeros_like(rows), *mixed))
    return all(_equal_sums((filled[n][i], copies[n][i]), (a[n][i], b[n][i])) for n in filled for i in (0, 1))


def _is_proportional(feed: HeldOut, index: int, sums: Sums) -> bool:
    """Whether two batches of different sizes, with copies of a single example, have the same mean loss."""
    divisor = feed.layout.replicas * feed.layout.microbatches
    size, other = (
        sums(feed.rearrange(index, np.zeros(n, int))) for n in (feed.size, divisor * (1 + (divisor == feed.size)))
    )
    return all(
        _equal_sums((total * other[name][1],), (other[name][0] * count,)) for name, (total, count) in size.items()
    )


def _equal_sums(some: tuple[float, ...], others: tuple[float, ...]) -> bool:
    largest = max(map(abs, (*some, *others)))
    return math.isfinite(largest) and abs(sum(some) - sum(others)) <= SAME * largest


def _message(name: str, count: int, fit: int, divisor: int) -> str:
    """Returns a message: the loss is not a sum over examples, so the last batch is smaller, or left out."""
    examples = f"held-out examples of {name}" if name else "held-out examples"
    why = "the loss does not add up over examples, so no copies are subtracted"
    if not fit:
        last = f"last of the {examples} is" if count == 1 else f"last {count} {examples} are"
        return f"{why}: the {last} not evaluated, as the mesh needs a multiple of {divisor}"
    remainder = (
        f"; {count - fit} of {count} are left out, as the mesh needs a multiple of {divisor}" if fit < count else ""
    )
    return f"{why}: the last {examples} are a batch of {fit}{remainder}"
