"""PipeDream's dynamic program finds the cheapest division of a chain into replicated stages on a tree of devices.

    A0(i..j)     the cost of layers i to j on one device
    Tk(i..j, m)  their cost on m replicas; a replica is a part of level k with all its devices, at A(k-1)(i..j)
    Ak(i..j, m)  = min( Tk(i..j, m),
                        min over s, m' < m of max( Tk(i..s, m'),  the traffic after s,  Ak(s+1..j, m - m') ) )

The recurrence differs from the published one in two ways. First, it splits off the first stage instead of the last.
Both give the same minimum, but the number of devices in later stages ("behind") is then known, and hence the number of
minibatches in flight and the exact memory. Second, each table is computed for plans of exactly n stages, in order to
find the plan with the fewest stages that is nearly as good as the best.

Source: Narayanan et al. (2019), section 3.1; msr-fiddle/pipedream.
"""

from collections.abc import Iterator, Sequence
from functools import cached_property
from typing import Protocol

import numpy as np

from jaxpar.partition.objective import Level, devices
from jaxpar.partition.replicated_stages import Segment

CLOSE = 1 + 1e-12  # tolerance for sums of the same numbers in another order
ANY = 0  # any number of stages


class Costs(Protocol):
    """The costs to minimise; the cost of a plan is that of its most expensive part."""

    @property
    def behind_matters(self) -> bool:
        """Whether a device's cost depends on the number of devices in later stages ("behind" it)."""
        ...

    def device(self, behind: int) -> np.ndarray:
        """Returns A0, if `behind` devices per device run later stages. Shape [layers, layers], inf if j < i."""
        ...

    def replicated(self, inner: np.ndarray, level: int, replicas: int) -> np.ndarray:
        """Returns Tk from A(k-1)."""
        ...

    def sent(self, level: int) -> np.ndarray:
        """Returns the cost of a cut after each layer, over a link of the level. Shape [layers]."""
        ...


class Tables:
    """The tables of one chain on one topology, computed on demand.

    Args:
      costs: The costs to minimise.
      layers: Number of layers of the chain.
      tree: Levels of the topology, innermost first.
    """

    def __init__(self, costs: Costs, layers: int, tree: Sequence[Level]):
        self.costs, self.layers, self.tree, self.cache = costs, layers, tree, {}

    @cached_property
    def least_costs(self) -> list[float]:
        """The least cost of all plans on 1, 2, ... parts of the outermost level."""
        best = self._best(len(self.tree), ANY, 0)
        return [float(best[m][0, -1]) for m in sorted(best)]

    def fewest_stages(self, limit: float) -> tuple[tuple[Segment, ...], list[float]]:
        """Finds the plan with the fewest stages that costs at most `limit`; also returns the least cost per number.

        Ties go to the plan with the most replicas in its first stage, which has the fewest minibatches in flight, then
        to the plan with the earliest cut.
        """
        top, costs = len(self.tree), []
        for stages in range(1, min(self.layers, devices(self.tree)) + 1):
            best = self._best(top, stages, 0)
            costs.append(float(best[self.tree[-1].size][0, -1]))
            if costs[-1] <= limit * CLOSE:
                break
        return tuple(self._parts(top, len(costs), 0, self.tree[-1].size, 0, self.layers - 1)), costs

    def _columns(self, level: int) -> range:
        """Returns the values of j to compute; at the outermost level, only the last layer."""
        return range(self.layers - 1, self.layers) if level == len(self.tree) else range(self.layers)

    def _best(self, level: int, stages: int, behind: int) -> dict[int, np.ndarray]:
        """Returns Ak for each m, over plans with this number of stages. Shape [layers, columns] each."""
        key = ("best", level, stages, behind)
        if key not in self.cache:
            columns, best = self._columns(level), {}
            for m in range(1, self.tree[level - 1].size + 1):
                best[m] = self._replicated(level, stages, m, self._behind(level, m, m, behind))[:, columns]
                for first, head_stages, tail_stages in _shares(self.tree, level, stages, m):
                    head = self._replicated(level, head_stages, first, self._behind(level, m, first, behind))
                    tail = best if tail_stages == ANY else self._best(level, tail_stages, behind)
                    best[m] = np.minimum(best[m], self._with_later_stages(head, level, tail[m - first]))
            self.cache[key] = best
        return self.cache[key]

    def _with_later_stages(self, head: np.ndarray, level: int, rest: np.ndarray) -> np.ndarray:
        """Returns the min over s of max(head(i..s), traffic after s, rest(s+1..j)). Shape [layers, columns]."""
        costs, traffic = np.full(rest.shape, np.inf), self.costs.sent(level)
        for column, j in enumerate(self._columns(level)):
            if j:
                tail = np.maximum(traffic[:j], rest[1 : j + 1, column])
                costs[:j, column] = np.maximum(head[:j, :j], tail).min(axis=1)
        return costs

    def _replicated(self, level: int, stages: int, replicas: int, behind: int) -> np.ndarray:
        """Returns Tk over inner plans with this number of stages. Shape [layers, layers]; inf for too few devices."""
        if stages > devices(self.tree[: level - 1]):
            return np.full((self.layers, self.layers), np.inf)
        key = ("alike", level, stages if level > 1 else 1, replicas, behind)
        if key not in self.cache:
            size = self.tree[level - 2].size
            inner = self.costs.device(behind) if level == 1 else self._best(level - 1, stages, behind)[size]
            self.cache[key] = self.costs.replicated(inner, level, replicas)
        return self.cache[key]

    def _behind(self, level: int, parts: int, first: int, behind: int) -> int:
        """Returns the number of devices in later stages, divided by the number of parts of this stage.

        This stage has `first` of `parts` parts; later stages have the other parts, and `behind` more devices.

        The result is rounded up. This changes no plan, because the number of weight versions is rounded up anyway, and
        ceil((n + x) / m) = ceil((n + ceil(x)) / m).
        """
        if not self.costs.behind_matters:
            return 0
        return -(-(devices(self.tree[: level - 1]) * (parts - first) + behind) // first)

    def _parts(self, level: int, stages: int, behind: int, m: int, i: int, j: int) -> Iterator[Segment]:
        """Yields the segments of the best plan with this number of stages for layers i to j."""
        column = self._columns(level).index(j)
        limit = self._best(level, stages, behind)[m][i, column] * CLOSE
        if self._replicated(level, stages, m, self._behind(level, m, m, behind))[i, j] <= limit:
            yield self._part(level, stages, self._behind(level, m, m, behind), m, i, j)
            return
        for first, head_stages, tail_stages in _shares(self.tree, level, stages, m):
            behind_head = self._behind(level, m, first, behind)
            head, tail = (
                self._replicated(level, head_stages, first, behind_head),
                self._best(level, tail_stages, behind)[m - first],
            )
            cost = np.maximum(head[i, i:j], np.maximum(self.costs.sent(level)[i:j], tail[i + 1 : j + 1, column]))
            if cost.min(initial=np.inf) <= limit:
                cut = i + int(np.argmax(cost <= limit))
                yield self._part(level, head_stages, behind_head, first, i, cut)
                yield from self._parts(level, tail_stages, behind, m - first, cut + 1, j)
                return
        raise RuntimeError("a table of the dynamic program has an entry that no plan gives")

    def _part(self, level: int, stages: int, behind: int, replicas: int, i: int, j: int) -> Segment:
        size = self.tree[level - 2].size
        inner = self._parts(level - 1, stages, behind, size, i, j) if level > 1 else ()
        return Segment(i, j + 1, replicas, tuple(inner))


def _shares(tree: Sequence[Level], level: int, stages: int, parts: int) -> Iterator[tuple[int, int, int]]:
    """Yields all triples (parts of the first segment, its stages, stages of the rest), from most parts to fewest."""
    size = devices(tree[: level - 1])
    for first in range(parts - 1, 0, -1):
        if stages == ANY:
            yield first, ANY, ANY
            continue
        for head_stages in range(max(1, stages - size * (parts - first)), min(size, stages - 1) + 1):
            yield first, head_stages, stages - head_stages
