"""Arrays are born where they belong; batches are put where they are used."""

from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxpar.sharding.names import Tree


def shardings(mesh: Mesh, specs: Tree, *, memory: str | None = None) -> Tree:
    """Returns a `NamedSharding` for every `PartitionSpec` of a tree."""
    return jax.tree.map(
        lambda spec: NamedSharding(mesh, spec, memory_kind=memory), specs, is_leaf=lambda x: isinstance(x, PartitionSpec)
    )


def shard_bytes(array: Any, spec: PartitionSpec, sizes) -> int:
    """Returns the bytes of one device's shard of an array with `shape` and `dtype`.

    >>> import jax, jax.numpy as jnp
    >>> shard_bytes(jax.ShapeDtypeStruct((8, 6), jnp.float32), PartitionSpec("fsdp"), {"fsdp": 4})
    48
    """
    if jax.dtypes.issubdtype(array.dtype, jax.dtypes.prng_key):
        item = 8  # threefry: two uint32 words
    else:
        item = array.dtype.itemsize
    count = 1
    for dim, size in enumerate(array.shape):
        axes = spec[dim] if dim < len(spec) else None
        ways = 1
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            ways *= sizes[axis]
        count *= size // ways
    return count * item


def tree_bytes(tree: Tree, specs: Tree, sizes) -> int:
    """Returns the bytes of one device's shards of a whole tree."""
    leaves = jax.tree.leaves(tree)
    flat = jax.tree.leaves(specs, is_leaf=lambda x: isinstance(x, PartitionSpec))
    return sum(shard_bytes(leaf, spec, sizes) for leaf, spec in zip(leaves, flat, strict=True))
