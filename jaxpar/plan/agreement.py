"""How well predictions agree with what was found: ranks decide which layout is taken, errors how many fit."""

from collections.abc import Sequence

import numpy as np

from jaxpar.errors import refuse


def ranks(values: Sequence[float]) -> np.ndarray:
    """Returns the rank of each value, the smallest 1; equal ones share the mean of theirs.

    >>> ranks([0.3, 0.1, 0.3])
    array([2.5, 1. , 2.5])
    """
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def rank_correlation(predicted: Sequence[float], found: Sequence[float]) -> float:
    """Returns the correlation of the ranks: 1 where both have the same order, -1 where it is reversed.

    Source: Spearman (1904), The proof and measurement of association between two things.

    Raises:
      JaxparError: If there are fewer than 3 pairs, or one side is the same everywhere.
    """
    if len(predicted) != len(found) or len(found) < 3 or min(np.ptp(predicted), np.ptp(found)) == 0:
        raise refuse(
            f"a rank correlation of {len(predicted)} predictions with {len(found)} values",
            rule="pairs, 3 or more, that are not all the same",
            fix="more layouts: --verify 10",
        )
    return float(np.corrcoef(ranks(predicted), ranks(found))[0, 1])
