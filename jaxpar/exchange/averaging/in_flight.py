"""All-reduces that overlap with training steps: `depart` starts one, and `arrive` reads its result some steps later.

    parts [replica, ...] ─► one vector ─► all-reduce ─────────────────────────► mean of each part
                                          (steps that do not read it) ─► after ─┘

XLA starts a collective when its operands are ready, waits for it before its result is read, and may move both. Here
the read of the vector also depends on `after`, so XLA cannot move it before the ops that compute `after`.
"""

import math
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.exchange.replica_mesh import AXIS, ReplicaMesh
from jaxpar.mesh.collective import ShardShape


def depart(tree: Mapping[str, jax.Array], between: ReplicaMesh) -> dict[str, jax.Array]:
    """Sums arrays [replica, ...] over replicas; returns one vector per dtype, each from one collective.

    Args:
      tree: Arrays by path, sharded by `between.specs`.
      between: The mesh and the specs of the arrays.
    """

    def inside(*parts: jax.Array) -> dict[str, jax.Array]:
        flat = dict(zip(tree, parts, strict=True))
        return {
            dtype: jax.lax.psum(jnp.concatenate([flat[path].reshape(-1) for path in paths]), AXIS)
            for dtype, paths in _by_dtype(tree).items()
        }

    in_specs = tuple(PartitionSpec(AXIS, *between.specs[path]) for path in tree)
    out_specs = dict.fromkeys(_by_dtype(tree), _vector(between))
    return jax.shard_map(inside, mesh=between.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)(
        *tree.values()
    )


def arrive(
    vectors: Mapping[str, jax.Array], parts: Mapping[str, ShardShape], between: ReplicaMesh, after: jax.Array
) -> dict[str, jax.Array]:
    """Returns the means over replicas of the arrays that `depart` sent, without the dim of replicas.

    Args:
      vectors: The result of `depart`.
      parts: The part of each array that a device holds, by path.
      between: The mesh and the specs of the arrays.
      after: Floats [replica, ...]; the vectors are read only after it is computed. If its first element on a device is
        nan, the means on that device are nan.
    """

    def inside(vectors: Mapping[str, jax.Array], after: jax.Array) -> tuple[jax.Array, ...]:
        gate = after.reshape(-1)[0]
        means = {}
        for dtype, paths in _by_dtype(parts).items():
            vector = jnp.where(gate == gate, vectors[dtype], jnp.nan) / between.replicas
            ends = [0]
            for path in paths:
                ends.append(ends[-1] + math.prod(parts[path].shape))
                means[path] = vector[ends[-2] : ends[-1]].reshape(parts[path].shape)
        return tuple(means[path] for path in parts)

    in_specs = dict.fromkeys(vectors, _vector(between)), PartitionSpec(AXIS)
    out_specs = tuple(between.specs[path] for path in parts)
    program = jax.shard_map(inside, mesh=between.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)
    return dict(zip(parts, program(vectors, after), strict=True))


def _by_dtype(tree: Mapping[str, Any]) -> dict[str, list[str]]:
    result: dict[str, list[str]] = {}
    for path, array in tree.items():
        result.setdefault(str(jnp.dtype(array.dtype)), []).append(path)
    return result


def _vector(between: ReplicaMesh) -> PartitionSpec:
    """Returns the spec of a vector that is sharded over the devices of a replica and replicated over replicas."""
    return PartitionSpec(tuple(axis for axis in between.mesh.axis_names if axis != AXIS))
