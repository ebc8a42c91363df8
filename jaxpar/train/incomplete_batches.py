"""HeldOut-out examples that are fewer than a batch, in an evaluation that counts each example once.

    F  the examples, filled up to a batch with copies of one      A  some rows of F, and rows of C in place of others
    C  a batch of nothing but that one                            B  the others, and rows of C in place of the first

    F + C == A + B    the loss adds up over examples: the copies are subtracted, and no other program is compiled
    F + C != A + B    the loss of an example depends on the others (contrastive losses, rankings, counts of at least 1):
                      the examples are a batch of their own size, of which those that the mesh does not divide are left
                      out; the run says so

The first such batch of every evaluation is checked, and every other one once.
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
SAME = 1e-4  # of the largest of four sums: float32 sums of equal numbers in another order differ by far less


class HeldOut(Protocol):
    """The held-out batches of one set, as `Feed` has them."""

    layout: Layout
    size: int

    def evaluation(self, index: int) -> list[WeightedBatch]:
        """Returns the index-th examples with their weights; none after the last."""
        ...

    def rearranged(self, index: int, rows: np.ndarray) -> Mapping[str, Any]:
        """Returns rows of the index-th batch as a batch of so many rows."""
        ...


@dataclass
class Incomplete:
    """How a run evaluates batches of one set that are not full.

    Attributes:
      name: Of the set; "" for the examples that the source of a run holds out.
      adds_up: Whether sums and counts add up over examples, as far as is known.
      checked: Indices of the batches that were checked.
      counts: Of each entry of the loss the counts of full batches, two at most: a mean counts 1 in all of them.
      noted_sizes: Sizes of batches of which the run was told.
    """

    name: str = ""
    adds_up: bool = True
    checked: set[int] = field(default_factory=set)
    counts: dict[str, set[float]] = field(default_factory=dict)
    noted_sizes: set[int] = field(default_factory=set)

    def totals(
        self, feed: HeldOut, index: int, evaluate: Evaluate, *, first: bool, draws: bool, say: Callable[[str], None]
    ) -> tuple[Totals, bool] | None:
        """Returns the sums and counts of the index-th examples, and whether they were an incomplete batch.

        Args:
          feed: The batches.
          index: Of these examples.
          evaluate: A batch to its sums and counts.
          first: Whether no incomplete batch came before it in this evaluation.
          draws: Whether the loss draws random numbers for each row.
          say: Is told what becomes of examples that are not evaluated by copies.

        Returns:
          None after the last examples.
        """

        def sums(batch: Mapping[str, Any]) -> Totals:
            found = jax.device_get(evaluate(batch))
            return {name: (float(total), float(count)) for name, (total, count) in found.items()}

        batches = feed.evaluation(index)
        if not batches:
            return None
        count = batches[0].examples
        if count and not self.adds_up:
            return self._smaller(feed, index, count, sums, say), True
        found = [sums(each.batch) for each in batches]
        if count and (first or (count > 1 and index not in self.checked)):
            self.checked.add(index)
            self.adds_up = _adds_up(feed, index, count, sums, draws=draws)
            if not self.adds_up:
                return self._smaller(feed, index, count, sums, say), True
        if not count:
            for name, (_, number) in found[0].items():
                seen = self.counts.setdefault(name, set())
                if len(seen) < 2:
                    seen.add(number)
        return summed([(each.weight, part) for each, part in zip(batches, found, strict=True)]), bool(count)

    def _smaller(self, feed: HeldOut, index: int, count: int, sums: Sums, say: Callable) -> Totals:
        """Returns the sums and counts of examples in a batch of their own size."""
        ways = feed.layout.replicas * feed.layout.microbatches
        fit = count // ways * ways
        if count not in self.noted_sizes:
            self.noted_sizes.add(count)
            say(_message(self.name, count, fit, ways))
        if not fit:
            return {}
        found = sums(feed.rearranged(index, np.arange(fit)))
        # a mean, whose count is that of a full batch, weighs as much as it has examples
        share = {name: fit / feed.size if self.counts.get(name) == {each[1]} else 1.0 for name, each in found.items()}
        return {name: (share[name] * total, share[name] * number) for name, (total, number) in found.items()}


def summed(parts: list[tuple[float, Totals]]) -> Totals:
    """Returns sums and counts, each part multiplied by its weight."""
    made: Totals = {}
    for weight, part in parts:
        for name, (total, count) in part.items():
            before = made.get(name, (0.0, 0.0))
            made[name] = (before[0] + weight * total, before[1] + weight * count)
    return made


def _adds_up(feed: HeldOut, index: int, count: int, sums: Sums, *, draws: bool) -> bool:
    """Returns whether sums and counts add up over examples.

    Args:
      feed: The batches.
      index: Of one that is filled up.
      count: Its examples.
      sums: A batch to its sums and counts.
      draws: Whether an example has another loss in another row.
    """
    size = feed.size
    if count == 1 and index:  # copies of one example tell nothing of others: those of the batch before do
        index, count = index - 1, size
    rows = np.arange(size)
    others = np.flatnonzero((rows < size // count * count) & (rows % count > 0))
    if len(others) < 2:
        return _is_proportional(feed, index, sums)
    first = np.isin(rows, others[::2])
    order = rows if draws else np.random.default_rng(0).permutation(size)  # the capacity of experts is for early rows
    mixed = (np.where(first, rows, 0)[order], np.where(first, 0, rows)[order])
    filled, copies, a, b = (sums(feed.rearranged(index, which)) for which in (rows, np.zeros_like(rows), *mixed))
    return all(_same((filled[n][i], copies[n][i]), (a[n][i], b[n][i])) for n in filled for i in (0, 1))


def _is_proportional(feed: HeldOut, index: int, sums: Sums) -> bool:
    """Returns whether another number of copies of one example has the same mean: of another program."""
    ways = feed.layout.replicas * feed.layout.microbatches
    size, other = (
        sums(feed.rearranged(index, np.zeros(n, int))) for n in (feed.size, ways * (1 + (ways == feed.size)))
    )
    return all(_same((total * other[name][1],), (other[name][0] * count,)) for name, (total, count) in size.items())


def _same(some: tuple[float, ...], others: tuple[float, ...]) -> bool:
    largest = max(map(abs, (*some, *others)))
    return math.isfinite(largest) and abs(sum(some) - sum(others)) <= SAME * largest


def _message(name: str, count: int, fit: int, ways: int) -> str:
    """Returns in words how examples of a loss that does not add up are evaluated."""
    of = f"held-out examples of {name}" if name else "held-out examples"
    why = "the loss does not add up over examples, so no copies are subtracted"
    if not fit:
        last = f"last of the {of} is" if count == 1 else f"last {count} {of} are"
        return f"{why}: the {last} not evaluated, as the mesh divides multiples of {ways}"
    left = f"; {count - fit} of {count} are left out, as the mesh divides multiples of {ways}" if fit < count else ""
    return f"{why}: the last {of} are a batch of {fit}{left}"
