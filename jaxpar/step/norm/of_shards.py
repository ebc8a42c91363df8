"""The norm of all gradients, each device summing what it holds.

shards ─► squares, added up ─► / devices that hold the same ─► one sum over all axes that cut any ─► root
          in float32 or more
"""

import math
from collections import defaultdict

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AxisType, Mesh, PartitionSpec

from jaxpar.models.named import axes_of
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree
from jaxpar.sharding.shard_bytes import pieces
from jaxpar.step.parameters.accumulators import accumulator_dtype

Axes = tuple[str, ...]


def whole(gradients: Tree, *, squared: bool = False) -> jax.Array:
    """Returns the norm of gradients, or its square, as XLA sums it; matrices in 8 bits have no gradient."""
    return optax.tree.norm([_wide(leaf) for leaf in jax.tree.leaves(gradients) if _is_float(leaf)], squared=squared)


def as_optax(gradients: Tree) -> jax.Array:
    """Returns the norm of gradients by the equations of `optax.tree.norm`: squares in the dtype of each gradient."""
    return optax.tree.norm([leaf for leaf in jax.tree.leaves(gradients) if _is_float(leaf)])


def norm(layout: Layout, gradients: Tree) -> jax.Array:
    """Returns the root of the sum of all squares, as `optax.tree.norm` does; only the order of the sums is another.

    Args:
      layout: Whose `updated` says where each gradient is.
      gradients: Of all parameters.
    """
    specs = jax.tree.leaves(layout.updated, is_leaf=lambda spec: isinstance(spec, PartitionSpec))
    leaves = [_wide(leaf) for leaf in jax.tree.leaves(gradients) if _is_float(leaf)]
    specs = [spec for spec, leaf in zip(specs, jax.tree.leaves(gradients), strict=True) if _is_float(leaf)]
    axes = tuple(axis for axis, size in layout.sizes.items() if size > 1 and any(axis in _cut(spec) for spec in specs))
    if not axes or not _equal_pieces(layout, gradients):
        return whole(gradients)

    def summed(shards: list[jax.Array]) -> jax.Array:
        held: defaultdict[Axes, list[jax.Array]] = defaultdict(list)
        for shard, spec in zip(shards, specs, strict=True):
            held[tuple(axis for axis in axes if axis not in _cut(spec))].append(shard)
        # what several devices hold counts once
        own = [
            optax.tree.norm(each, squared=True) / math.prod(layout.sizes[axis] for axis in alike)
            for alike, each in held.items()
        ]
        return jax.lax.psum(sum(own[1:], own[0]), axes)

    total = jax.shard_map(
        summed, mesh=layout.on, in_specs=(specs,), out_specs=PartitionSpec(), check_vma=False
    )(leaves)  # fmt: skip
    return jnp.sqrt(total)


def _wide(leaf: jax.Array) -> jax.Array:
    return leaf.astype(accumulator_dtype(leaf.dtype))  # in float16 the square of 256 is infinite


def _is_float(leaf: jax.Array) -> bool:
    return jnp.issubdtype(leaf.dtype, jnp.inexact)


def _cut(spec: PartitionSpec) -> Axes:
    return tuple(axis for entry in spec for axis in axes_of(entry))


def _equal_pieces(layout: Layout, gradients: Tree) -> bool:
    """Returns whether the devices hold equal pieces, as `updated` says, in a program that XLA partitions."""
    mesh: Mesh = jax.sharding.get_abstract_mesh()  # pyright: ignore[reportAssignmentType]
    if mesh.empty or any(kind != AxisType.Auto for kind in mesh.axis_types):
        return False
    if jax.tree.structure(gradients) != jax.tree.structure(layout.params):
        return False

    def equal(gradient: jax.Array, like: jax.Array, spec: PartitionSpec) -> bool:
        ways = pieces(spec, gradient.ndim, layout.sizes)
        return gradient.shape == like.shape and not any(n % way for n, way in zip(gradient.shape, ways, strict=True))

    return all(jax.tree.leaves(jax.tree.map(equal, gradients, layout.params, layout.updated)))
