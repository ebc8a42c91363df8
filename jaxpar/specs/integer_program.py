"""An integer linear program, solved by HiGHS: columns (variables) with costs, and rows (constraints) on their sums."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy import optimize, sparse

GAP = 5e-4  # the search ends once the best solution is proven to be at most this share above the optimum
Row = tuple[Mapping[int, float], float, float]  # coefficients of columns, and the limits of their sum


class IntegerProgram:
    """The columns and rows added so far."""

    def __init__(self) -> None:
        self._cost: list[float] = []
        self._binary: list[bool] = []
        self._rows: list[Row] = []

    def add_column(self, cost: float = 0.0, *, binary: bool = False) -> int:
        """Adds a column, and returns its number."""
        self._cost.append(cost)
        self._binary.append(binary)
        return len(self._cost) - 1

    def add_row(self, terms: Mapping[int, float], low: float, high: float) -> None:
        """Adds a row: the sum of these columns, with coefficients, is within low..high."""
        self._rows.append((terms, low, high))


def vector(amounts: Mapping[int, float], size: int) -> np.ndarray:
    """Returns the amounts of columns as an array. Shape [size]."""
    values = np.zeros(size)
    values[list(amounts)] = list(amounts.values())
    return values


def minimize(
    cost: np.ndarray, rows: Sequence[Row], *, upper: np.ndarray, binary: np.ndarray, nodes: int = 1
) -> optimize.OptimizeResult:
    """Returns the values of the columns that have the least cost.

    Args:
      cost: Cost of each column. Shape [columns].
      rows: Coefficients of columns, and the lower and upper limit of their sum.
      upper: Largest value of each column; the least is 0. Shape [columns].
      binary: Whether each column is an integer. Shape [columns].
      nodes: Limit of the search tree.
    """
    entries = [(number, column, value) for number, (terms, _, _) in enumerate(rows) for column, value in terms.items()]
    numbers, columns, values = (np.array(each) for each in zip(*entries, strict=True))
    matrix = sparse.csr_matrix((values, (numbers, columns)), shape=(len(rows), len(cost)))
    low, high = (np.array([row[side] for row in rows], float) for side in (1, 2))
    limits: Any = optimize.LinearConstraint(matrix, low, high)  # pyright: ignore[reportArgumentType]
    options = {"node_limit": nodes, "mip_rel_gap": GAP}
    bounds = optimize.Bounds(0, upper)  # pyright: ignore[reportArgumentType]
    return optimize.milp(cost, constraints=limits, bounds=bounds, integrality=binary, options=options)
