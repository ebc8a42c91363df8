"""Sums of a stage's gradients over the microbatches, unsharded or as shards: see `sum_shards`.

layers    gradients of the stage's chunks      added in B, or in W if backward is split
shared    gradients of embedding and head      added in the F of the last part and the B of the first
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.dataflow import Traced
from jaxpar.jaxprs.in_place_scan import BufferEntry
from jaxpar.pipeline.run.program import TableRow
from jaxpar.pipeline.run.slots import load
from jaxpar.pipeline.run.sum_shards import Shards, sum_shapes, zeros_like_shapes
from jaxpar.sharding.names import GRADIENT

Tree = Any


class GradientSums:
    """The gradient sums of one stage.

    Args:
      shared: Parameters outside of the stack.
      chunks: Parameters of the stage's layers. Shape [chunks, layers, ...].
      constrain: As for `execute`.
      shards: As for `execute`.
      split: Whether backward is split into B and W.
    """

    def __init__(
        self, shared: Tree, chunks: Tree, *, constrain: Callable[[str, Tree], Tree], shards: Shards | None, split: bool
    ):
        self.shared, self.chunks, self.constrain, self.shards = shared, chunks, constrain, shards
        self.layers_op = "W" if split else "B"

    @jax.named_scope(GRADIENT)
    def zeros(self) -> dict[str, Tree]:
        """Returns the sums `layers` and `shared` before the first tick."""
        layers, shared = (
            (sum_shapes(self.chunks), sum_shapes(self.shared))
            if self.shards is None
            else (self.shards.sum_shapes(self.chunks, leading_dims=1), self.shards.sum_shapes(self.shared))
        )
        shapes = {"layers": layers, "shared": shared}
        return {name: self.constrain(name, zeros_like_shapes(tree)) for name, tree in shapes.items()}

    def layer_entries(self, sums: Tree, row: TableRow) -> Tree:
        """Returns references to the sums of a chunk, to which a B adds one layer at a time."""

        def sum_entry(path: tuple, buffer: jax.Array) -> BufferEntry:
            def join(old: jax.Array, new: jax.Array) -> jax.Array:  # gradients of a layer, or of all layers of a chunk
                missing_dims = buffer.ndim - 1 - new.ndim
                if self.shards is not None:
                    new = self.shards.scatter_one(path[0].key, new, missing_dims=missing_dims)
                return add(old, new)

            return BufferEntry(buffer, row.chunk, row.runs("B"), join, row_major=False)

        return jax.tree_util.tree_map_with_path(sum_entry, sums)

    def add_layers(self, sums: Tree, row: TableRow, gradients: Tree) -> Tree:
        """Adds the gradients of a chunk."""
        chunk_sums, active = load(sums, row.chunk), row.runs(self.layers_op)
        gradients = gradients if self.shards is None else self.shards.scatter(gradients)
        write = partial(jax.lax.dynamic_update_index_in_dim, index=row.chunk, axis=0)
        with jax.named_scope(GRADIENT):
            total = jax.tree.map(lambda a, b: jnp.where(active, add(a, b), a), chunk_sums, gradients)
            return self.constrain("layers", jax.tree.map(write, sums, total))

    def initial_shared(self, sums: Tree) -> Tree:
        """Returns the value to which an op adds its gradients of `shared`: the sums, or zeros if they are sharded."""
        # an op cannot add an unsharded gradient to a shard: `add_shared` scatters the op's gradient and adds it
        return sums if self.shards is None else zeros_like_shapes(sum_shapes(self.shared))

    def add_shared(self, sums: Tree, total: Tree, readers: list[Traced]) -> Tree:
        """Returns the sums after an op.

        Args:
          sums: The sums before the op.
          total: The sum of `initial_shared` and the op's gradients.
          readers: Those of embedding and head whose gradients the op may have added.
        """
        if self.shards is None:
            return total
        # others have zero gradients: skipping them saves a reduce-scatter of the vocabulary in most ticks
        reads = [reader.reads()[0] for reader in readers]
        new = self.shards.scatter({path: total[path] for path in sums if any(read[path] for read in reads)})
        return self.constrain("shared", {path: add(x, new[path]) if path in new else x for path, x in sums.items()})


@jax.named_scope(GRADIENT)
def add(total: jax.Array, gradient: jax.Array) -> jax.Array:
    """Adds a gradient in the dtype of the sum."""
    return total + gradient.astype(total.dtype)
