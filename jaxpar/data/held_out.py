"""Batches held-out examples at a fixed size, and counts each example once under any additive loss function.

    80 examples, batches of 48      1     x loss sums of [0 .. 47]
                                    1     x loss sums of [48 .. 79, 48 x 16]     32 examples, padded with 16 copies
                                  - 16/48 x loss sums of [48 x 48]               subtracts the copies

A smaller last batch would be another program to compile, and the mesh may not divide it. A mask would have to be read
by the loss function. Sums and counts, as nearly every loss function returns them, add up over examples: so a batch of
copies of one example measures its sums, which are subtracted. The evaluation loop checks that sums add up
(`jaxpar.train.evaluation.incomplete`).
"""

from collections.abc import Callable

import numpy as np

from jaxpar.data.spec import Batch, Rows, WeightedBatch


def weighted_batches(count: int, size: int, rows: Rows, read: Callable[[np.ndarray], Batch]) -> list[WeightedBatch]:
    """Returns batches of `size` rows whose weighted loss sums count each of `count` examples once.

    If the examples fit several times, all are repeated as often, so fewer than half of the rows are padding: the
    subtracted sum is smaller than the other, and float32 sums keep their digits.

    Args:
      count: Number of examples, at most `size`; 0 gives no batch.
      size: Rows of a batch.
      rows: The rows of the batches to return, in order; None means all.
      read: Maps indices of examples, below `count`, to their arrays.
    """
    if not count:
        return []
    copies, padding = divmod(size, count)
    indices = np.concatenate([np.tile(np.arange(count), copies), np.zeros((padding,), np.int64)])
    selection = slice(None) if rows is None else rows
    batches = [WeightedBatch(1 / copies, read(indices[selection]), count if count < size else 0)]
    if padding:
        batches.append(WeightedBatch(-padding / (size * copies), read(np.zeros_like(indices)[selection])))
    return batches
