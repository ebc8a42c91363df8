"""Bytes of an array on one device."""

from typing import Any

import jax
from jax.sharding import PartitionSpec


def shard_bytes(array: Any, spec: PartitionSpec, sizes) -> int:
    """Returns the bytes of one device's shard of an array with `shape` and `dtype`.

    >>> import jax, jax.numpy as jnp
    >>> shard_bytes(jax.ShapeDtypeStruct((8, 6), jnp.float32), PartitionSpec("fsdp"), {"fsdp": 4})
    48
    """
    item = jax.numpy.dtype(array.dtype).itemsize
    count = 1
    for dim, size in enumerate(array.shape):
        axes = spec[dim] if dim < len(spec) else None
        ways = 1
        for axis in () if axes is None else (axes,) if isinstance(axes, str) else axes:
            ways *= sizes[axis]
        count *= size // ways
    return count * item
