"""Who hears whom in gossip: doubly stochastic matrices, whose row r says how replica r weighs what it hears."""

import math

import numpy as np

from jaxpar.errors import nearest, refuse

_CLOSE = 1e-6  # how far from 1 rows and columns may sum


def ring(count: int) -> np.ndarray:
    """Each hears the one before and the one after it, and weighs all three alike. Shape [count, count]."""
    return _circulant(count, (-1, 0, 1))


def exponential(count: int) -> np.ndarray:
    """Each hears those 1, 2, 4, ... before it (Assran et al. 2019, arXiv:1811.10792). Shape [count, count]."""
    return _circulant(count, (0, *(1 << power for power in range((count - 1).bit_length()))))


def torus(count: int) -> np.ndarray:
    """Each hears its four neighbours on a grid, as square as it can be, whose sides meet. Shape [count, count]."""
    rows = max(side for side in range(1, math.isqrt(count) + 1) if count % side == 0)
    columns = count // rows
    made = np.zeros((count, count))
    for replica in range(count):
        row, column = divmod(replica, columns)
        for down, right in ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1)):
            made[replica, (row + down) % rows * columns + (column + right) % columns] += 1 / 5
    return made


GRAPHS = {"ring": ring, "torus": torus, "exponential": exponential}


def matrix(graph: str | tuple, count: int) -> np.ndarray:
    """Returns the matrix of a graph between so many replicas. Shape [count, count].

    Args:
      graph: A name of `GRAPHS`, or the rows of a matrix of that size.
      count: Replicas.
    """
    return GRAPHS[graph](count) if isinstance(graph, str) else np.asarray(graph, float)


def check(graph: str | tuple) -> None:
    """Refuses what is no graph.

    Raises:
      JaxparError: If it is neither a known name nor a doubly stochastic matrix.
    """
    if isinstance(graph, str):
        if graph not in GRAPHS:
            raise refuse(
                f"graph = {graph!r:.60}",
                rule=f"a graph is one of {', '.join(GRAPHS)}, or a matrix",
                fix=nearest(graph, GRAPHS),
            )
        return
    square = len({len(graph), *map(len, graph)}) == 1
    found = np.asarray(graph, float) if square else np.zeros((1, 1))
    sums = [*found.sum(0), *found.sum(1)]
    if not square or found.min() < 0 or not all(abs(total - 1) <= _CLOSE for total in sums):
        raise refuse(
            f"graph = {[list(row) for row in graph]!r:.80}",
            rule="a graph is a doubly stochastic matrix: square, none below 0, and every row and column sums to 1",
            fix="[[0.5, 0.5], [0.5, 0.5]] for two replicas, or one of " + ", ".join(GRAPHS),
        )


def contraction(found: np.ndarray) -> float:
    """Returns how much of their disagreement replicas keep when they meet: the second largest singular value."""
    return float(np.linalg.svd(found - np.full_like(found, 1 / len(found)), compute_uv=False)[0])


def _circulant(count: int, offsets: tuple[int, ...]) -> np.ndarray:
    made = np.zeros((count, count))
    for replica in range(count):
        for offset in offsets:
            made[replica, (replica - offset) % count] += 1 / len(offsets)
    return made
