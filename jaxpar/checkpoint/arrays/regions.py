"""Regions: the boxes of an array that devices hold, and their overlaps with the blocks of a file."""

from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.checkpoint.arrays.blocks import Block, Box

Slices = tuple[slice, ...]


def is_key(dtype: Any) -> bool:
    """Whether a dtype is one of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def region_of(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Start and shape of an index into an array; for key data, without the trailing dim of uint32 words."""
    bounds = [bound.indices(dim)[:2] for bound, dim in zip(index, shape, strict=False)]
    return tuple(first for first, _ in bounds), tuple(last - first for first, last in bounds)


def overlap(block: Block, region: Box) -> tuple[Slices, Slices] | None:
    """Overlap of a block and a region, as indices into the block and into the region; None if they are disjoint."""
    block_slices, region_slices = [], []
    for start, size, first, count in zip(block.start, block.shape, *region, strict=True):
        low, high = max(start, first), min(start + size, first + count)
        if low >= high:
            return None
        block_slices.append(slice(low - start, high - start))
        region_slices.append(slice(low - first, high - first))
    return tuple(block_slices), tuple(region_slices)
