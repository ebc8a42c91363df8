"""Regions: the boxes of an array that devices hold, and where a block of a file overlaps with them."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.checkpoint.arrays.blocks import Block, Box

Slices = tuple[slice, ...]


def is_key(dtype: Any) -> bool:
    """Returns whether elements are PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Returns start and shape of an index into an array; of keys, without the dim of the numbers they consist of."""
    bounds = [each.indices(dim)[:2] for each, dim in zip(index, shape, strict=False)]
    return tuple(first for first, _ in bounds), tuple(last - first for first, last in bounds)


def overlap(block: Block, region: Box) -> tuple[Slices, Slices] | None:
    """Returns where a block and a region overlap, as indices into the block and into the region; None if nowhere."""
    inside, outside = [], []
    for start, size, first, count in zip(block.start, block.shape, *region, strict=True):
        low, high = max(start, first), min(start + size, first + count)
        if low >= high:
            return None
        inside.append(slice(low - start, high - start))
        outside.append(slice(low - first, high - first))
    return tuple(inside), tuple(outside)
