"""Arrays on their way between replicas while these go on: one vector, read after what shall not wait for it.

    parts [replica, ...] ─► one vector ─► all-reduce ─────────────────────────► mean of each part
                                          (steps that do not read it) ─► after ─┘

XLA starts a collective where its operands are there and waits for it before its result is read, and moves both as it
likes. What reads the vector here reads `after` too, so that it cannot be moved in front of what makes that.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.exchange.between import AXIS, Between
from jaxpar.exchange.part import Part


def depart(tree: Mapping[str, jax.Array], between: Between) -> dict[str, jax.Array]:
    """Returns the sum over replicas of arrays [replica, ...], as one vector of each dtype: one collective each.

    Args:
      tree: Path to array, with `between.specs`.
      between: Where they are.
    """

    def inside(*parts: jax.Array) -> dict[str, jax.Array]:
        flat = dict(zip(tree, parts, strict=True))
        return {
            dtype: jax.lax.psum(jnp.concatenate([flat[path].reshape(-1) for path in paths]), AXIS)
            for dtype, paths in _by_dtype(tree).items()
        }

    given = tuple(PartitionSpec(AXIS, *between.specs[path]) for path in tree)
    made = dict.fromkeys(_by_dtype(tree), _vector(between))
    return jax.shard_map(inside, mesh=between.mesh, in_specs=given, out_specs=made, check_vma=False)(*tree.values())


def arrive(
    vectors: Mapping[str, jax.Array], parts: Mapping[str, Part], between: Between, after: jax.Array
) -> dict[str, jax.Array]:
    """Returns the means over replicas of what has departed, without the dim of replicas.

    Args:
      vectors: As `depart` returned them.
      parts: Path of each array to what a device holds of it.
      between: Where they are.
      after: Of floats, [replica, ...]: nothing of the vectors is read before it is there. If its first number on a
        device is nan, so are the means there.
    """

    def inside(vectors: Mapping[str, jax.Array], after: jax.Array) -> tuple[jax.Array, ...]:
        late = after.reshape(-1)[0]
        found = {}
        for dtype, paths in _by_dtype(parts).items():
            vector = jnp.where(late == late, vectors[dtype], jnp.nan) / between.replicas
            ends = [0]
            for path in paths:
                ends.append(ends[-1] + math.prod(parts[path].shape))
                found[path] = vector[ends[-2] : ends[-1]].reshape(parts[path].shape)
        return tuple(found[path] for path in parts)

    given = dict.fromkeys(vectors, _vector(between)), PartitionSpec(AXIS)
    made = tuple(between.specs[path] for path in parts)
    run = jax.shard_map(inside, mesh=between.mesh, in_specs=given, out_specs=made, check_vma=False)
    return dict(zip(parts, run(vectors, after), strict=True))


def _by_dtype(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for path, array in tree.items():
        found.setdefault(str(jnp.dtype(array.dtype)), []).append(path)
    return found


def _vector(between: Between) -> PartitionSpec:
    """Returns where a vector is of which each device of a replica has its own, and all replicas the same."""
    return PartitionSpec(tuple(axis for axis in between.mesh.axis_names if axis != AXIS))
