"""Gossip: each replica takes a weighted mean of its own parameters and its neighbours'.

A graph of gossip is a doubly stochastic matrix: row r has the weights of the mean that replica r takes.
"""

import dataclasses
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from jaxpar.errors import Problem, check_ranges, refuse, suggest
from jaxpar.exchange.base import SECTION, STEPS, Exchange, Replicas
from jaxpar.mesh.collective import Traffic

if TYPE_CHECKING:
    from jaxpar.exchange.replica_mesh import ReplicaMesh


_CLOSE = 1e-6  # tolerance of the sums of rows and columns


def ring(count: int) -> np.ndarray:
    """Weights of a ring: replica i averages i - 1, i and i + 1, with equal weights. Shape [count, count]."""
    return _circulant(count, (-1, 0, 1))


def exponential(count: int) -> np.ndarray:
    """Weights of an exponential graph: replica i averages i, i - 1, i - 2, i - 4, ... (Assran et al. 2019,
    arXiv:1811.10792). Shape [count, count].
    """
    return _circulant(count, (0, *(1 << power for power in range((count - 1).bit_length()))))


def torus(count: int) -> np.ndarray:
    """Weights of a torus, as square as possible: a replica averages itself and its four neighbours. Shape [count,
    count].
    """
    rows = max(side for side in range(1, math.isqrt(count) + 1) if count % side == 0)
    columns = count // rows
    weights = np.zeros((count, count))
    for replica in range(count):
        row, column = divmod(replica, columns)
        for row_step, column_step in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            weights[replica, (row + row_step) % rows * columns + (column + column_step) % columns] += 1 / 5
    return weights


GRAPHS = {"ring": ring, "torus": torus, "exponential": exponential}


def mixing_matrix(graph: str | tuple, count: int) -> np.ndarray:
    """Returns the matrix of a graph. Shape [count, count].

    Args:
      graph: A name of `GRAPHS`, or the rows of a matrix of that size.
      count: Number of replicas.
    """
    return GRAPHS[graph](count) if isinstance(graph, str) else np.asarray(graph, float)


def check_graph(graph: str | tuple) -> None:
    """Refuses an invalid graph.

    Raises:
      JaxparError: If it is neither a known name nor a doubly stochastic matrix.
    """
    if isinstance(graph, str):
        if graph not in GRAPHS:
            raise refuse(
                f"graph = {graph!r:.60}",
                rule=f"a graph is one of {', '.join(GRAPHS)}, or a matrix",
                fix=suggest(graph, GRAPHS),
            )
        return
    square = len({len(graph), *map(len, graph)}) == 1
    weights = np.asarray(graph, float) if square else np.zeros((1, 1))
    sums = [*weights.sum(0), *weights.sum(1)]
    if not square or weights.min() < 0 or not all(abs(total - 1) <= _CLOSE for total in sums):
        raise refuse(
            f"graph = {[list(row) for row in graph]!r:.80}",
            rule="a graph is a doubly stochastic matrix: square, none below 0, and every row and column sums to 1",
            fix="[[0.5, 0.5], [0.5, 0.5]] for two replicas, or one of " + ", ".join(GRAPHS),
        )


def contraction(found: np.ndarray) -> float:
    """Returns the factor by which a sync round shrinks the replicas' differences: the second largest singular value."""
    return float(np.linalg.svd(found - np.full_like(found, 1 / len(found)), compute_uv=False)[0])


def _circulant(count: int, offsets: tuple[int, ...]) -> np.ndarray:
    weights = np.zeros((count, count))
    for replica in range(count):
        for offset in offsets:
            weights[replica, (replica - offset) % count] += 1 / len(offsets)
    return weights


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
        check_graph(self.graph)

    def problems(self, replicas: int) -> list[Problem]:
        """Returns a problem if the given matrix has another number of replicas."""
        if isinstance(self.graph, str) or len(self.graph) == replicas:
            return []
        return [
            Problem(
                f"a graph of {len(self.graph)} rows with data={replicas}",
                "a graph has a row and a column for each replica",
                f"{replicas} x {replicas} numbers, or one of {', '.join(GRAPHS)}",
            )
        ]

    def synchronize(self, replicas: Replicas, between: "ReplicaMesh") -> Replicas:
        """Replaces each replica's parameters by the weighted mean of its own and its neighbours'."""
        weights = mixing_matrix(self.graph, between.replicas)
        return dataclasses.replace(replicas, params=between.mix(replicas.params, weights))

    def traffic(self, shards: Mapping[str, object], replicas: int) -> tuple[Traffic, ...]:
        """Returns one collective-permute per parameter and neighbour."""
        from jaxpar.exchange.replica_mesh import mix_traffic

        return mix_traffic(shards, mixing_matrix(self.graph, replicas), every=self.every)
