"""The global gradient norm: each device sums over its own shards.

shards ─► sum of squares ─► / number of copies of a shard ─► one sum over all sharding axes ─► root
          in float32 or wider
"""

import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar.models.dim_names import axes_of
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.specs import abstract_params, update_specs
from jaxpar.sharding.names import Tree
from jaxpar.sharding.shard_bytes import shard_counts
from jaxpar.step.parameters.accumulators import accumulator_dtype

Axes = tuple[str, ...]


def unsharded_norm(gradients: Tree, *, squared: bool = False) -> jax.Array:
    """Returns the norm of gradients, or its square, partitioned by XLA; 8-bit matrices have no gradient."""
    return optax.tree.norm([_wide(leaf) for leaf in jax.tree.leaves(gradients) if _is_float(leaf)], squared=squared)


def optax_norm(gradients: Tree) -> jax.Array:
    """Returns the norm of gradients by the equations of `optax.tree.norm`: squares in the dtype of each gradient."""
    return optax.tree.norm([leaf for leaf in jax.tree.leaves(gradients) if _is_float(leaf)])


def norm(layout: Layout, gradients: Tree) -> jax.Array:
    """Returns the root of the sum of all squares, like `optax.tree.norm` but summed in another order.

    Args:
      layout: Its `updated` has the spec of each gradient.
      gradients: The gradients of all parameters.
    """
    specs = jax.tree.leaves(update_specs(layout), is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    leaves = [_wide(leaf) for leaf in jax.tree.leaves(gradients) if _is_float(leaf)]
    specs = [spec for spec, leaf in zip(specs, jax.tree.leaves(gradients), strict=True) if _is_float(leaf)]
    axes = tuple(axis for axis, size in layout.sizes.items() if size > 1 and any(axis in _cut(spec) for spec in specs))
    if not axes or not _equal_pieces(layout, gradients):
        return unsharded_norm(gradients)

    def summed(shards: list[jax.Array]) -> jax.Array:
        shards_by_axes: defaultdict[Axes, list[jax.Array]] = defaultdict(list)
        for shard, spec in zip(shards, specs, strict=True):
            shards_by_axes[tuple(axis for axis in axes if axis not in _cut(spec))].append(shard)
        # a shard with several copies counts once
        partial_sums = [
            optax.tree.norm(group, squared=True) / math.prod(layout.sizes[axis] for axis in copy_axes)
            for copy_axes, group in shards_by_axes.items()
        ]
        return jax.lax.psum(sum(partial_sums[1:], partial_sums[0]), axes)

    total = jax.shard_map(
        summed, mesh=layout.device_mesh, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )(leaves)  # fmt: skip
    return jnp.sqrt(total)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(accumulator_dtype(leaf.dtype))  # in float16 the square of 256 is infinite


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _cut(spec: PartitionSpec) -> Axes:
    return tuple(axis for entry in spec for axis in axes_of(entry))


def _equal_pieces(layout: Layout, gradients: Tree) -> bool:
    """Whether the specs in `updated` split the gradients evenly, in a program that XLA partitions."""
    mesh: Mesh = jax.sharding.get_abstract_mesh()  # pyright: ignore[reportAssignmentType]
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return False
    if jax.tree.structure(gradients) != jax.tree.structure(abstract_params(layout)):
        return False

    def equal(gradient: jax.Array, param: jax.Array, spec: PartitionSpec) -> bool:
        ways = shard_counts(spec, gradient.ndim, layout.sizes)
        return gradient.shape == param.shape and not any(n % way for n, way in zip(gradient.shape, ways, strict=True))

    return all(jax.tree.leaves(jax.tree.map(equal, gradients, abstract_params(layout), update_specs(layout))))
