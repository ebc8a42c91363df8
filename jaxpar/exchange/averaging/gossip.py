"""Gossip: each replica takes a weighted mean of its own parameters and its neighbours'."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from jaxpar.errors import Problem, check_ranges
from jaxpar.exchange.averaging import graphs
from jaxpar.exchange.base import SECTION, STEPS, Exchange, Replicas
from jaxpar.exchange.traffic import Traffic

if TYPE_CHECKING:
    from jaxpar.exchange.replica_mesh import ReplicaMesh


@dataclass(frozen=True, kw_only=True)
class Gossip(Exchange):
    """Gossip SGD (Lian et al. 2017, arXiv:1705.09056), which here updates first, then averages.

    After its own update a replica takes the weighted mean of its neighbours' new parameters: w_i = sum_j M_ij w_j. The
    mean over replicas is unchanged, and their differences shrink by the second largest singular value of M. If all
    weights are equal, it is `local`.

    Attributes:
      name: gossip (every N steps each replica takes a mean of its own parameters and its neighbours').
      every: Number of steps from one sync round to the next.
      graph: ring, torus, exponential, or the rows of a doubly stochastic matrix: row r has the weights of replica r.
    """

    name: str = "gossip"
    every: int = 1
    graph: str | tuple[tuple[float, ...], ...] = "ring"
    replicas_differ = True

    def __post_init__(self):
        check_ranges(self, SECTION, {"every": (1, STEPS)})
        if not isinstance(self.graph, str):  # an array, or lists
            object.__setattr__(self, "graph", tuple(tuple(map(float, row)) for row in self.graph))
        graphs.check(self.graph)

    def problems(self, replicas: int) -> list[Problem]:
        """Returns a problem if the given matrix has another number of replicas."""
        if isinstance(self.graph, str) or len(self.graph) == replicas:
            return []
        return [
            Problem(
                f"a graph of {len(self.graph)} rows with data={replicas}",
                "a graph has a row and a column for each replica",
                f"{replicas} x {replicas} numbers, or one of {', '.join(graphs.GRAPHS)}",
            )
        ]

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Replaces each replica's parameters by the weighted mean of its own and its neighbours'."""
        weights = graphs.matrix(self.graph, between.replicas)
        return dataclasses.replace(replicas, params=between.mix(replicas.params, weights))

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns one collective-permute per parameter and neighbour."""
        from jaxpar.exchange.replica_mesh import mix_traffic

        return mix_traffic(shards, graphs.matrix(self.graph, replicas), every=self.every)
