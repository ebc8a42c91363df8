"""Reads the blocks that this process needs, hashes each one as it is read, and builds arrays with given shardings."""

import contextlib
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.checkpoint.arrays.blocks import WORKERS, Block, Box, altered_line, read
from jaxpar.checkpoint.arrays.regions import Slices, is_key, overlap, region_of
from jaxpar.checkpoint.manifest import Array, Manifest

AT_ONCE = 4 * 2**30  # bytes of arrays that are in host memory at the same time, on the way to the devices


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block to read, and its destinations.

    Attributes:
      path: Path of its array.
      block: The block.
      targets: (view of a region in memory, indices into the block of the part to copy there).
    """

    path: str
    block: Block
    targets: Sequence[tuple[np.ndarray, Slices]]


def load(
    folder: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, jax.Array], list[str]]:
    """Loads arrays of a checkpoint with the given shardings, and verifies the bytes that this process reads.

    Args:
      folder: The checkpoint.
      contents: Its manifest.
      wanted: Path to shape, dtype and sharding of the arrays to load; a saved array is cast to this dtype.

    Returns:
      Path to array; not to be used if a file is damaged.
      A line for each file of which bytes that this process needs are altered or cannot be read.
    """
    arrays: dict[str, jax.Array] = {}
    faults: list[str] = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(WORKERS) as workers:
        files = _Files(folder, stack)
        for names in _groups(contents.arrays, wanted):
            regions = {name: _regions(contents.arrays[name], wanted[name]) for name in names}
            reads = [
                item for name in names for item in _block_reads(name, contents.blocks.get(name, ()), regions[name])
            ]
            faults += files.open(reads)
            if faults or (faults := _altered_lines(reads, list(workers.map(files.fill, reads)))):
                break
            arrays |= {name: _make_array(contents.arrays[name], wanted[name], regions[name]) for name in names}
    return arrays, faults


class _Files:
    """The files of a checkpoint, opened when they are first needed."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.folder, self.stack = folder, stack
        self.handles: dict[str, int] = {}

    def open(self, needed: Sequence[BlockRead]) -> list[str]:
        """Opens files, and returns a line for each one that fails."""
        faults = []
        for file in {item.block.file: None for item in needed if item.block.file not in self.handles}:
            try:
                self.handles[file] = os.open(self.folder / file, os.O_RDONLY)
                self.stack.callback(os.close, self.handles[file])
            except OSError as error:
                faults.append(f"{file} cannot be read: {error.strerror}")
        return faults

    def fill(self, each: BlockRead) -> bool:
        """Reads a block into its destinations; returns whether its hash is right."""
        handle, block = self.handles[each.block.file], each.block
        first, _ = each.targets[0]
        try:
            # the usual case, the same layout as at the save: the block is read in place
            if len(each.targets) == 1 and first.shape == block.shape and first.flags.c_contiguous:
                return read(handle, block, _bytes(first))
            buffer = np.empty(block.shape, first.dtype)
            is_good = read(handle, block, _bytes(buffer))
        except OSError:
            return False
        for target, inside in each.targets:
            target[...] = buffer[inside]
        return is_good


def _groups(arrays: Mapping[str, Array], names: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yields the names in groups of at most `AT_ONCE` bytes, or of one."""
    group: list[str] = []
    total = 0
    for name in names:
        if group and total + arrays[name].bytes > AT_ONCE:
            yield group
            group, total = [], 0
        group.append(name)
        total += arrays[name].bytes
    yield group


def _regions(array: Array, want: jax.ShapeDtypeStruct) -> dict[Box, np.ndarray]:
    """Allocates memory for each region of an array that devices of this process hold."""
    size = array.bytes // math.prod(array.shape) if array.bytes else want.dtype.itemsize
    kind = np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")  # copies bytes, whatever their dtype
    indices = want.sharding.addressable_devices_indices_map(array.shape).values()  # pyright: ignore
    boxes = dict.fromkeys(region_of(index, array.shape) for index in indices if index is not None)
    return {box: np.empty(box[1], kind) for box in boxes}


def _block_reads(path: str, blocks: Sequence[Block], regions: Mapping[Box, np.ndarray]) -> Iterator[BlockRead]:
    for block in blocks:
        shared = [(data, overlap(block, box)) for box, data in regions.items()]
        targets = [(data[(*common[1], ...)], common[0]) for data, common in shared if common is not None]
        if targets:
            yield BlockRead(path, block, targets)


def _altered_lines(needed: Sequence[BlockRead], good: Sequence[bool]) -> list[str]:
    altered: dict[str, list[str]] = {}
    for item, is_good in zip(needed, good, strict=True):
        if not is_good:
            altered.setdefault(item.block.file, []).append(item.path)
    return [altered_line(file, paths) for file, paths in altered.items()]


def _make_array(array: Array, want: jax.ShapeDtypeStruct, regions: Mapping[Box, np.ndarray]) -> jax.Array:
    def part(index: Slices) -> Any:
        data = regions[region_of(index, array.shape)]
        if is_key(want.dtype):
            return jax.random.wrap_key_data(jnp.asarray(_numbers(data)), impl=_impl(want))
        if not data.size:
            return np.empty(data.shape, want.dtype)
        return data.view(jnp.dtype(array.dtype)).astype(want.dtype, copy=False)

    return jax.make_array_from_callback(array.shape, want.sharding, part, dtype=want.dtype)  # pyright: ignore


def _numbers(keys: np.ndarray) -> np.ndarray:
    """Key data: the uint32 words of keys, along a new last dim."""
    return keys.reshape(-1).view(np.uint32).reshape(*keys.shape, keys.itemsize // 4)


def _impl(want: jax.ShapeDtypeStruct) -> Any:
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(partial(jax.random.key, impl=name), 0).dtype: name for name in names}[want.dtype]


def _bytes(data: np.ndarray) -> memoryview:
    return data.reshape(-1).view(np.uint8).data
