"""Sharded gradient accumulation: reduce-scatters the gradients of every tick, and accumulates only shards.

    unsharded    sum += gradient                               reduced once, after the last tick
    shards       sum += this device's shard of the gradients   scattered in every tick with gradients, in float32

It trades traffic for memory: a sum takes 1 / num_shards of the bytes, but devices send gradients in every tick with
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

from jaxpar.sharding.names import GRADIENT


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

    def sum_shapes(self, params: Mapping[str, Any], *, leading_dims: int = 0) -> dict[str, jax.ShapeDtypeStruct]:
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


def sum_shapes(params: Any) -> Any:
    """Returns the shapes of gradient sums, in float32 or more."""
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, jnp.promote_types(x.dtype, jnp.float32)), params)


def zeros_like_shapes(shapes: Any) -> Any:
    """Returns zeros of these shapes and dtypes."""
    return jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), shapes)
