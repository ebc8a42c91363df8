"""Gossip: each replica takes a weighted mean of its own parameters and its neighbours'."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.averaging import graphs
from jaxpar.exchange.base import Exchange, Replicas
from jaxpar.exchange.sent import Sent
from jaxpar.exchange.settings import SECTION, STEPS

if TYPE_CHECKING:
    from jaxpar.exchange.between import Between


@dataclass(frozen=True, kw_only=True)
class Gossip(Exchange):
    """Gossip SGD (Lian et al. 2017, arXiv:1705.09056), in the form that adapts, then combines.

    After its own update a replica takes the weighted mean of what its neighbours have then: w_i = sum_j M_ij w_j. The
    mean over replicas is kept, and what they differ by shrinks by the second singular value of M. Where all hear all
    alike it is `local`.

    Attributes:
      name: gossip (every so many steps each replica takes a mean of its own parameters and its neighbours').
      every: Steps from one meeting to the next.
      graph: Who hears whom: ring, torus, exponential, or the rows of a doubly stochastic matrix.
    """

    name: str = "gossip"
    every: int = 1
    graph: str | tuple[tuple[float, ...], ...] = "ring"
    differ = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS)})
        if not isinstance(self.graph, str):  # an array, or lists
            object.__setattr__(self, "graph", tuple(tuple(map(float, row)) for row in self.graph))
        graphs.check(self.graph)

    def problems(self, replicas: int) -> list[Problem]:
        """Returns whether its matrix is for another number of replicas."""
        if isinstance(self.graph, str) or len(self.graph) == replicas:
            return []
        return [
            Problem(
                f"a graph of {len(self.graph)} rows with data={replicas}",
                "a graph has a row and a column for each replica",
                f"{replicas} x {replicas} numbers, or one of {', '.join(graphs.GRAPHS)}",
            )
        ]

    def agree(self, replicas: Replicas, between: "Between") -> Replicas:
        """Returns the replicas, each mixed with its neighbours."""
        weights = graphs.matrix(self.graph, between.replicas)
        return dataclasses.replace(replicas, params=between.mixed(replicas.params, weights))

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns a permute of every parameter for each neighbour."""
        from jaxpar.exchange.between import mixing

        return mixing(shards, graphs.matrix(self.graph, replicas), every=self.every)
