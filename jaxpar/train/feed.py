"""Batches on their way to the devices: every process reads the rows that its own devices hold, and no others."""

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from jaxpar.data.spec import Batch, Source, Weighted
from jaxpar.parallel.layout import Layout


class Feed:
    """The batches of a run as its step wants them.

    Args:
      source: Where batches come from.
      layout: Where they go.
      size: Examples per global batch.
    """

    def __init__(self, source: Source, layout: Layout, size: int):
        self.source, self.layout, self.size = source, layout, size
        self.rows = rows_here(layout, size) if jax.process_count() > 1 else None

    def batch(self, step: int) -> Mapping[str, Any]:
        """Returns the training batch of a step: in one process as it is, in several on the devices."""
        if self.rows is None:
            return self.source.batch(step, self.size)
        return self._placed(self.source.batch(step, self.size, self.rows))

    def evaluation(self, index: int) -> list[Weighted]:
        """Returns the index-th held-out examples, in batches with their weights; none after the last."""
        if self.rows is None:
            return self.source.evaluation(index, self.size)
        batches = self.source.evaluation(index, self.size, self.rows)
        return [Weighted(each.weight, self._placed(each.batch)) for each in batches]

    def _placed(self, batch: Batch) -> dict[str, jax.Array]:
        return {name: self._global(value) for name, value in batch.items()}

    def _global(self, value: np.ndarray) -> jax.Array:
        """Returns the global array [size, ...] of which this process has some rows."""
        rows: Any = self.rows
        shape = (self.size, *value.shape[1:])

        def shard(index):
            begin, end, _ = index[0].indices(self.size)
            at = np.searchsorted(rows, begin)
            return value[(slice(at, at + end - begin), *index[1:])]

        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(shape, self.layout.sharding(self.layout.batch_spec(shape)), shard)


def rows_here(layout: Layout, size: int) -> np.ndarray:
    """Returns the rows of a global batch that this process's devices hold, in order."""
    sharding = layout.sharding(layout.batch_spec((size,)))
    indices = sharding.addressable_devices_indices_map((size,)).values()
    held = {index[0].indices(size)[:2] for index in indices if index is not None}
    return np.concatenate([np.arange(begin, end) for begin, end in sorted(held)])
