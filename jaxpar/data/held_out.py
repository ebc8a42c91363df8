"""Held-out examples as batches of one size, each example counted once whatever the loss function is.

    80 examples, batches of 48      1     x loss sums of [0 .. 47]
                                    1     x loss sums of [48 .. 79, 48 x 16]     32 examples, filled up to 48 with one
                                  - 16/48 x loss sums of [48 x 48]               which is taken away again

A smaller last batch would be another program to compile, and the mesh may not divide it. A mask would have to be read
by the loss function. Sums and counts, as nearly every loss function returns them, add up over examples: so copies of
one example are counted by a batch of nothing else, and subtracted. The loop that evaluates them checks that they add up
(`jaxpar.train.evaluation.incomplete`).
"""

from collections.abc import Callable

import numpy as np

from jaxpar.data.spec import Batch, Rows, Weighted


def weighted(count: int, size: int, rows: Rows, read: Callable[[np.ndarray], Batch]) -> list[Weighted]:
    """Returns batches of `size` rows whose weighted sums are those of each of `count` examples once.

    Where they fit several times, all come several times, and less than half of the rows are copies beyond that: what
    is subtracted is smaller than what it is subtracted from, so float32 sums keep their digits.

    Args:
      count: Examples there are, at most `size`; with 0 there is no batch.
      size: Rows of a batch.
      rows: Which rows of the batches are wanted, in order; None means all.
      read: Indices of examples, below `count`, to their arrays.
    """
    if not count:
        return []
    copies, more = divmod(size, count)
    filled = np.concatenate([np.tile(np.arange(count), copies), np.zeros((more,), np.int64)])
    wanted = slice(None) if rows is None else rows
    batches = [Weighted(1 / copies, read(filled[wanted]), count if count < size else 0)]
    if more:
        batches.append(Weighted(-more / (size * copies), read(np.zeros_like(filled)[wanted])))
    return batches
