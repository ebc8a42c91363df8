"""PipeDream's dynamic program: the cheapest way to cut a chain into stages with replicas, on a tree of devices.

    A0(i..j)     what layers i to j cost on one device
    Tk(i..j, m)  what they cost on m parts of level k that all do the same, each with all its devices: A(k-1)(i..j)
    Ak(i..j, m)  = min( Tk(i..j, m),
                        min over s, m' < m of max( Tk(i..s, m'),  what is sent after s,  Ak(s+1..j, m - m') ) )

Two departures from the published recurrence. It takes the first stage off, not the last: both give the same minimum,
and so the devices behind a stage are known, from which follows how many minibatches it has in flight, and how much
memory it needs, exactly. And each table is also made for plans of exactly so many stages, so that the fewest can be
found that are nearly as good.

Source: Narayanan et al. (2019), section 3.1; msr-fiddle/pipedream.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from jaxpar.partition.stages import Part
from jaxpar.partition.topology import Level, devices

CLOSE = 1 + 1e-12  # sums of the same numbers in another order
ANY = 0  # as many stages as is best


class Costs(Protocol):
    """The costs to minimise, over plans whose cost is that of their most expensive piece."""

    @property
    def behind_matters(self) -> bool:
        """Whether a device's cost depends on how many devices are behind it."""
        ...

    def device(self, behind: int) -> np.ndarray:
        """Returns A0, with so many devices behind each one of the stage. Shape [layers, layers], inf where j < i."""
        ...

    def replicated(self, inner: np.ndarray, level: int, replicas: int) -> np.ndarray:
        """Returns Tk from A(k-1)."""
        ...

    def sent(self, level: int) -> np.ndarray:
        """Returns what it costs to cut after each layer, over a link of that level. Shape [layers]."""
        ...


class Tables:
    """The tables of one chain on one topology, made when they are asked for.

    Args:
      costs: The costs that are minimised.
      layers: Layers of the chain.
      tree: Levels, innermost first.
    """

    def __init__(self, costs: Costs, layers: int, tree: Sequence[Level]):
        self.costs, self.layers, self.tree, self.made = costs, layers, tree, {}

    @cached_property
    def least(self) -> list[float]:
        """The least cost of all plans on 1, 2, ... parts of the outermost level."""
        best = self._best(len(self.tree), ANY, 0)
        return [float(best[m][0, -1]) for m in sorted(best)]

    def fewest(self, limit: float) -> tuple[tuple[Part, ...], list[float]]:
        """Returns the plan of fewest stages that costs at most `limit`, and the least cost of 1, 2, ... as many stages.

        Of equals, the one with most replicas in its first stage, so that fewest minibatches are in flight, then the one
        with the earliest cut.
        """
        top, costs = len(self.tree), []
        for stages in range(1, min(self.layers, devices(self.tree)) + 1):
            best = self._best(top, stages, 0)
            costs.append(float(best[self.tree[-1].size][0, -1]))
            if costs[-1] <= limit * CLOSE:
                break
        return tuple(self._parts(top, len(costs), 0, self.tree[-1].size, 0, self.layers - 1)), costs

    def _columns(self, level: int) -> range:
        """Returns the last layers that matter: of the outermost level, only the last of all."""
        return range(self.layers - 1, self.layers) if level == len(self.tree) else range(self.layers)

    def _best(self, level: int, stages: int, behind: int) -> dict[int, np.ndarray]:
        """Returns Ak for each m, of plans of so many stages. Shape of each [layers, columns]."""
        key = ("best", level, stages, behind)
        if key not in self.made:
            columns, best = self._columns(level), {}
            for m in range(1, self.tree[level - 1].size + 1):
                best[m] = self._alike(level, stages, m, self._behind(level, m, m, behind))[:, columns]
                for first, mine, others in self._shares(level, stages, m):
                    head = self._alike(level, mine, first, self._behind(level, m, first, behind))
                    rest = best if others == ANY else self._best(level, others, behind)
                    best[m] = np.minimum(best[m], self._after(head, level, rest[m - first]))
            self.made[key] = best
        return self.made[key]

    def _after(self, head: np.ndarray, level: int, rest: np.ndarray) -> np.ndarray:
        """Returns the min over s of max(head(i..s), what is sent after s, rest(s+1..j)). Shape [layers, columns]."""
        found, sent = np.full(rest.shape, np.inf), self.costs.sent(level)
        for column, j in enumerate(self._columns(level)):
            if j:
                tail = np.maximum(sent[:j], rest[1 : j + 1, column])
                found[:j, column] = np.maximum(head[:j, :j], tail).min(axis=1)
        return found

    def _alike(self, level: int, stages: int, replicas: int, behind: int) -> np.ndarray:
        """Returns Tk, of so many stages inside. Shape [layers, layers]; inf where there are fewer devices."""
        if stages > devices(self.tree[: level - 1]):
            return np.full((self.layers, self.layers), np.inf)
        key = ("alike", level, stages if level > 1 else 1, replicas, behind)
        if key not in self.made:
            size = self.tree[level - 2].size
            inner = self.costs.device(behind) if level == 1 else self._best(level - 1, stages, behind)[size]
            self.made[key] = self.costs.replicated(inner, level, replicas)
        return self.made[key]

    def _behind(self, level: int, parts: int, first: int, behind: int) -> int:
        """Returns the devices behind each of the first stage's `first` of `parts` parts, `behind` being behind all.

        Rounded up: a device stashes a ceil of it as versions, and ceil((n + x) / m) = ceil((n + ceil(x)) / m).
        """
        if not self.costs.behind_matters:
            return 0
        return -(-(devices(self.tree[: level - 1]) * (parts - first) + behind) // first)

    def _shares(self, level: int, stages: int, parts: int) -> Iterator[tuple[int, int, int]]:
        """Yields (parts, stages, stages of the others) that the first stage of a cut may have, most parts first."""
        each = devices(self.tree[: level - 1])
        for first in range(parts - 1, 0, -1):
            if stages == ANY:
                yield first, ANY, ANY
                continue
            for mine in range(max(1, stages - each * (parts - first)), min(each, stages - 1) + 1):
                yield first, mine, stages - mine

    def _parts(self, level: int, stages: int, behind: int, m: int, i: int, j: int) -> Iterator[Part]:
        """Yields the parts of the best plan of so many stages for layers i to j."""
        column = self._columns(level).index(j)
        least = self._best(level, stages, behind)[m][i, column] * CLOSE
        if self._alike(level, stages, m, self._behind(level, m, m, behind))[i, j] <= least:
            yield self._part(level, stages, self._behind(level, m, m, behind), m, i, j)
            return
        for first, mine, others in self._shares(level, stages, m):
            after = self._behind(level, m, first, behind)
            head, rest = self._alike(level, mine, first, after), self._best(level, others, behind)[m - first]
            cost = np.maximum(head[i, i:j], np.maximum(self.costs.sent(level)[i:j], rest[i + 1 : j + 1, column]))
            if cost.min(initial=np.inf) <= least:
                cut = i + int(np.argmax(cost <= least))
                yield self._part(level, mine, after, first, i, cut)
                yield from self._parts(level, others, behind, m - first, cut + 1, j)
                return
        raise RuntimeError("a table of the dynamic program has an entry that no plan gives")

    def _part(self, level: int, stages: int, behind: int, replicas: int, i: int, j: int) -> Part:
        size = self.tree[level - 2].size
        inner = self._parts(level - 1, stages, behind, size, i, j) if level > 1 else ()
        return Part(i, j + 1, replicas, tuple(inner))
