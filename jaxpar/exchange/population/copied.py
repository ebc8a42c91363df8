"""Members become copies of others, whoever these are: the state of all goes around the mesh axis once.

    device 0: a   device 1: b   device 2: c      a member keeps what it is to become when that comes by
              c             a             b
              b             c             a

Which member copies which is known to the program only while it runs, so nothing shorter is certain to have met all.
A device holds its own state and one more.
"""

from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.exchange.between import AXIS
from jaxpar.exchange.sent import Sent
from jaxpar.mesh.collective import Collective
from jaxpar.sharding.names import Tree
from jaxpar.sharding.shard_bytes import short_dtype


def copied(tree: Tree, source: jax.Array, mesh: Mesh) -> Tree:
    """Returns a tree whose entry i is the entry source[i] of what is given, bit for bit.

    Args:
      tree: Arrays [member, ...], dim 0 over `data`; random keys too.
      source: Shape [member], the same on all devices.
      mesh: With an axis `data` whose size divides the members.
    """
    leaves, structure = jax.tree.flatten(tree)
    keys = [jnp.issubdtype(x.dtype, jax.dtypes.prng_key) for x in leaves]
    plain = [jax.random.key_data(x) if key else x for x, key in zip(leaves, keys, strict=True)]
    devices = mesh.shape[AXIS]

    def inside(source: jax.Array, *parts: jax.Array) -> tuple[jax.Array, ...]:
        device, own = jax.lax.axis_index(AXIS), parts[0].shape[0]
        wanted = jax.lax.dynamic_slice(source, (device * own,), (own,))

        def kept(shift: Any, came: tuple[jax.Array, ...], held: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            here = wanted // own == (device - shift) % devices
            shaped = lambda x: here.reshape(own, *(1,) * (x.ndim - 1))  # noqa: E731
            return tuple(jnp.where(shaped(x), x[wanted % own], y) for x, y in zip(came, held, strict=True))

        def turn(shift: jax.Array, both: tuple[Any, Any]) -> tuple[Any, Any]:
            ring = [(i, (i + 1) % devices) for i in range(devices)]
            came = tuple(jax.lax.ppermute(x, AXIS, ring) for x in both[0])
            return came, kept(shift, came, both[1])

        return jax.lax.fori_loop(1, devices, turn, (parts, kept(0, parts, parts)))[1]

    over = PartitionSpec(AXIS)
    made = jax.shard_map(
        inside, mesh=mesh, in_specs=(PartitionSpec(), *(over,) * len(plain)), out_specs=(over,) * len(plain),
        axis_names={AXIS}, check_vma=False,
    )(source, *plain)  # fmt: skip
    again = [
        jax.random.wrap_key_data(x, impl=jax.random.key_impl(leaf)) if key else x
        for x, leaf, key in zip(made, leaves, keys, strict=True)
    ]
    return jax.tree.unflatten(structure, again)


def everywhere(x: jax.Array, mesh: Mesh) -> jax.Array:
    """Returns an array [member] whole on all devices."""
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec()))


def rotated(shards: Mapping[str, Any], replicas: int, own: int, *, every: int) -> tuple[Sent, ...]:
    """Returns what `copied` sends of these parts of arrays.

    Args:
      shards: Path to the part of an array that a device holds of one member.
      replicas: Devices along `data`.
      own: Members on each.
      every: Steps from one such step to the next.
    """
    return tuple(
        Sent(
            every=every,
            collective=Collective(
                kind="collective-permute", axes=(AXIS,), dtype=short_dtype(shard.dtype), group=replicas,
                times=replicas - 1, payload=own * shard.size * jnp.dtype(shard.dtype).itemsize, cause=path,
                parameters=(path,),
            ),
        )
        for path, shard in shards.items()
    )  # fmt: skip
