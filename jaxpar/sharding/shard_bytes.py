"""Bytes of an array on one device."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import PartitionSpec


def shard_bytes(array: Any, spec: PartitionSpec, sizes) -> int:
    """Returns the bytes of one device's shard of an array with `shape` and `dtype`.

    >>> import jax, jax.numpy as jnp
    >>> shard_bytes(jax.ShapeDtypeStruct((8, 6), jnp.float32), PartitionSpec("fsdp"), {"fsdp": 4})
    48
    """
    return math.prod(shard_shape(array.shape, spec, sizes)) * itemsize(array.dtype)


def itemsize(dtype: Any) -> int:
    """Returns the bytes of one entry; the dtype may be that of random keys.

    >>> itemsize("float32"), itemsize(jax.random.key(0).dtype)
    (4, 8)
    """
    return dtype.itemsize if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.numpy.dtype(dtype).itemsize


def shard_shape(shape: Sequence[int], spec: PartitionSpec, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the shape of one device's shard of an array; of the first shard, if XLA pads the last.

    >>> shard_shape((8, 6), PartitionSpec("fsdp"), {"fsdp": 4})
    (2, 6)
    """
    return tuple(-(-size // ways) for size, ways in zip(shape, shard_counts(spec, len(shape), sizes), strict=True))


def shard_counts(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns the number of shards along each dim of an array.

    >>> shard_counts(PartitionSpec(("data", "fsdp")), 2, {"data": 2, "fsdp": 4})
    (8, 1)
    """
    entries = (*spec, *(None,) * (rank - len(spec)))
    axes = ((entry,) if isinstance(entry, str) else entry or () for entry in entries)
    return tuple(math.prod(sizes[axis] for axis in each) for each in axes)


def short_dtype(dtype: Any) -> str:
    """Returns the name of a dtype in HLO.

    >>> short_dtype("bfloat16")
    'bf16'
    """
    name = str(dtype) if jax.numpy.issubdtype(dtype, jax.dtypes.extended) else jax.numpy.dtype(dtype).name
    return name.replace("bfloat", "bf").replace("float", "f").replace("uint", "u").replace("int", "s")
