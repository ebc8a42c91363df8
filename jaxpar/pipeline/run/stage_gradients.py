"""Sums of a stage's gradients over the microbatches, unsharded or as shards.

    layers    gradients of the stage's chunks      added in B, or in W if backward is split
    shared    gradients of embedding and head      added in the F of the last part and the B of the first

    unsharded    sum += gradient                               reduced once, after the last tick
    shards       sum += this device's shard of the gradients   scattered in every tick with gradients, in float32

Shards trade traffic for memory: a sum takes 1 / num_shards of the bytes, but devices send gradients in every tick with
gradients instead of once per step. In a table that mixes ops, all devices reduce-scatter in every tick, outside of
`lax.switch`, because a collective needs all of them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.jaxprs.dataflow import Traced
from jaxpar.jaxprs.in_place_scan import BufferEntry
from jaxpar.pipeline.run.stage_buffers import load
from jaxpar.pipeline.run.tick_program import TableRow
from jaxpar.sharding.names import GRADIENT

Tree = Any


@dataclass(frozen=True, kw_only=True)
class Shards:
    """The sharding of the gradient sums.

    Attributes:
      axis: A mesh axis that is manual inside the table and splits examples.
      num_shards: Size of the axis.
      dims: Path of a parameter to its sharded dim. Gradients of other parameters are unsharded inside the table.
      other_axes: Axes that XLA handles inside the table and that also split gradients.
      specs: Path of a parameter to its spec over `other_axes`; omits parameters whose sharded dim `other_axes` also
        split.
    """

    axis: str
    num_shards: int
    dims: Mapping[str, int]
    other_axes: tuple[str, ...]
    specs: Mapping[str, PartitionSpec]

    def sum_shapes(self, params: Mapping[str, object], *, leading_dims: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
        """Returns the shapes of the gradient sums, for arrays with `leading_dims` additional leading dims."""
        shapes = {}
        for path, leaf in sum_shapes(params).items():
            sharded_dim = self.dims[path] + leading_dims if path in self.dims else None
            shape = [size // self.num_shards if dim == sharded_dim else size for dim, size in enumerate(leaf.shape)]
            shapes[path] = jax.ShapeDtypeStruct(shape, leaf.dtype)
        return shapes

    @jax.named_scope(GRADIENT)
    def scatter(self, gradients: Mapping[str, jax.Array]) -> dict[str, jax.Array]:
        """Returns this device's shards of the gradients, summed over the axis."""
        return {path: self.scatter_one(path, gradient) for path, gradient in gradients.items()}

    def scatter_one(self, path: str, gradient: jax.Array, *, missing_dims: int = 0) -> jax.Array:
        """Returns this device's shard of a gradient without the first `missing_dims` dims of its parameter."""
        if path not in self.dims:
            return gradient
        scatter = partial(reduce_scatter, axis=self.axis, dim=self.dims[path] - missing_dims)
        if path not in self.specs:
            # if another axis splits the same dim, a shard of its shard is not a shard of the array: XLA places it
            return scatter(gradient)
        return with_manual_axes(scatter, self.other_axes, PartitionSpec(*self.specs[path][missing_dims:]))(gradient)


def reduce_scatter(whole: jax.Array, *, axis: str, dim: int) -> jax.Array:
    """Reduce-scatters an array over a manual axis, in float32 or more."""
    # casts before the collective, which adds in the dtype of its operand
    exact = whole.astype(jnp.promote_types(whole.dtype, jnp.float32))
    return jax.lax.psum_scatter(exact, axis, scatter_dimension=dim, tiled=True)


def with_manual_axes(function: Callable, axes: Sequence[str], spec: PartitionSpec) -> Callable:
    """Runs a function of one array inside a `shard_map` over further axes, which split the array by a spec.

    XLA replicates operands of a manual collective over all automatic axes, so it would gather over these axes first.
    """
    if not axes:
        return function
    return jax.shard_map(function, in_specs=(spec,), out_specs=spec, axis_names=set(axes), check_vma=False)


def sum_shapes(params: Tree) -> Any:
    """Returns the shapes of gradient sums, in float32 or more."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def zeros_like_shapes(shapes: Tree) -> Any:
    """Returns zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)


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
