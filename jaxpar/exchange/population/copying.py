"""Copies members to other members: the state of all members rotates once around the mesh axis.

    device 0: a   device 1: b   device 2: c      a member takes its source's state when it arrives
              c             a             b
              b             c             a

The sources are known only at run time, so only a full rotation is sure to pass every source. A device holds its own
state and one more.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.exchange.replica_mesh import AXIS
from jaxpar.mesh.collective import Collective, Traffic
from jaxpar.sharding.names import Tree, short_dtype


def copy_members(tree: Tree, source: jax.Array, mesh: Mesh) -> Tree:
    """Returns a tree whose entry i is entry source[i] of `tree`, bit for bit.

    Args:
      tree: Arrays [member, ...], also random keys, with dim 0 sharded over `data`.
      source: Index of the entry to copy into each entry. Shape [member], the same on all devices.
      mesh: A mesh with an axis `data` whose size divides the number of members.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    plain = [jax.random.key_data(x) if key else x for x, key in zip(leaves, keys, strict=True)]
    devices = mesh.shape[AXIS]

    def inside(source: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        device, count = jax.lax.axis_index(AXIS), parts[0].shape[0]
        sources = jax.lax.dynamic_slice(source, (device * count,), (count,))

        def choose_copies(
            shift: jax.Array | int, passing: tuple[jax.Array, ...], copies: tuple[jax.Array, ...]
        ) -> tuple[jax.Array, ...]:
            is_passing = sources // count == (device - shift) % devices
            shaped = lambda x: is_passing.reshape(count, *(1,) * (x.ndim - 1))  # noqa: E731
            return tuple(jnp.where(shaped(x), x[sources % count], y) for x, y in zip(passing, copies, strict=True))

        def turn(shift: jax.Array, carry: tuple[Any, Any]) -> tuple[Any, Any]:
            ring = [(i, (i + 1) % devices) for i in range(devices)]
            passing = tuple(jax.lax.ppermute(x, AXIS, ring) for x in carry[0])
            return passing, choose_copies(shift, passing, carry[1])

        return jax.lax.fori_loop(1, devices, turn, (parts, choose_copies(0, parts, parts)))[1]

    spec = PartitionSpec(AXIS)
    outputs = jax.shard_map(
        inside, mesh=mesh, in_specs=(PartitionSpec(), *(spec,) * len(plain)), out_specs=(spec,) * len(plain),
        axis_names={AXIS}, check_vma=False,
    )(source, *plain)  # fmt: skip
    restored = [
        jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if key else x
        for x, leaf, key in zip(outputs, leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, restored)


def replicate(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Replicates an array [member] on all devices."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def rotation_traffic(
    shards: Mapping[str, Any], replicas: int, local_members: int, *, every: int
) -> tuple[Traffic, ...]:
    """Returns the traffic of `copy_members` for these shards.

    Args:
      shards: Maps the path of an array to the shard that a device holds, of one member.
      replicas: Number of devices along `data`.
      local_members: Number of members per device.
      every: Number of steps from one copy to the next.
    """
    return tuple(
        Traffic(
            every=every,
            collective=Collective(
                kind="collective-permute", axes=(AXIS,), dtype=short_dtype(shard.dtype), group=replicas,
                times=replicas - 1, payload=local_members * shard.size * jnp.dtype(shard.dtype).itemsize, cause=path,
                parameters=(path,),
            ),
        )
        for path, shard in shards.items()
    )  # fmt: skip
