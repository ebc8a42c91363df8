"""The files of a checkpoint's arrays: one per process, of blocks that are hashed in memory.

params/w, fsdp 2          process 0 writes arrays/00000       process 1 writes arrays/00001
    rows 0..31, rows 32..63   rows 0..15, rows 16..31, ...        rows 32..47, rows 48..63, ...

A block is a box of an array, of up to 16 MiB, in C order and uncompressed. jaxpar hashes it between the copy from the
device and the write, and again between the read and the copy to the device, so that no byte is read twice. The sharding
alone determines the process that writes a block, without communication; devices with copies of an array divide its
blocks. A process that restores reads the blocks that overlap with its shards, for any layout at the time of the save.

`blocks` cuts and checks, without JAX. To add a storage format: a file like this one, a new format number in
`checkpoint/manifest.py`, and its reader in `checkpoint/reading.py`.
"""

import contextlib
import itertools
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
from jax.typing import DTypeLike

from jaxpar.checkpoint.blocks import (
    SMALL,
    WORKERS,
    Box,
    SavedBlock,
    cut_boxes,
    describe_altered_file,
    digest,
    read_block,
)
from jaxpar.checkpoint.manifest import Manifest, SavedArray
from jaxpar.sharding.names import format_path

Slices = tuple[slice, ...]


def is_key(dtype: DTypeLike) -> bool:
    """Whether a dtype is one of PRNG keys."""
    return jnp.issubdtype(dtype, jax.dtypes.prng_key)


def index_to_box(index: tuple[slice, ...], shape: tuple[int, ...]) -> Box:
    """Start and shape of an index into an array; for key data, without the trailing dim of uint32 words."""
    bounds = [bound.indices(dim)[:2] for bound, dim in zip(index, shape, strict=False)]
    return tuple(first for first, _ in bounds), tuple(last - first for first, last in bounds)


def overlap(block: SavedBlock, region: Box) -> tuple[Slices, Slices] | None:
    """Overlap of a block and a region, as indices into the block and into the region; None if they are disjoint."""
    block_slices, region_slices = [], []
    for start, size, first, count in zip(block.start, block.shape, *region, strict=True):
        low, high = max(start, first), min(start + size, first + count)
        if low >= high:
            return None
        block_slices.append(slice(low - start, high - start))
        region_slices.append(slice(low - first, high - first))
    return tuple(block_slices), tuple(region_slices)


# Reads the blocks that this process needs, hashes each one as it is read, and builds arrays with given shardings.

AT_ONCE = 4 * 2**30  # bytes of arrays that are in host memory at the same time, on the way to the devices


@dataclass(frozen=True, slots=True)
class BlockRead:
    """A block to read, and its destinations.

    Attributes:
      path: Path of its array.
      block: The block.
      targets: Pairs (destination in host memory, slices of the block that are copied to it).
    """

    path: str
    block: SavedBlock
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
      A line per file in which bytes that this process needs are altered or cannot be read.
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
            if faults or (faults := _describe_altered_files(reads, list(workers.map(files.fill, reads)))):
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
                return read_block(handle, block, _bytes(first))
            buffer = np.empty(block.shape, first.dtype)
            is_good = read_block(handle, block, _bytes(buffer))
        except OSError:
            return False
        for target, inside in each.targets:
            target[...] = buffer[inside]
        return is_good


def _groups(arrays: Mapping[str, SavedArray], names: Mapping[str, object]) -> Iterator[list[str]]:
    """Yields groups of names with at most `AT_ONCE` bytes in total, or with a single name."""
    group: list[str] = []
    total = 0
    for name in names:
        if group and total + arrays[name].bytes > AT_ONCE:
            yield group
            group, total = [], 0
        group.append(name)
        total += arrays[name].bytes
    yield group


def _regions(array: SavedArray, want: jax.ShapeDtypeStruct) -> dict[Box, np.ndarray]:
    """Allocates memory for each region of an array that devices of this process hold."""
    size = array.bytes // math.prod(array.shape) if array.bytes else want.dtype.itemsize
    kind = np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")  # copies bytes, whatever their dtype
    indices = want.sharding.addressable_devices_indices_map(array.shape).values()  # pyright: ignore
    boxes = dict.fromkeys(index_to_box(index, array.shape) for index in indices if index is not None)
    return {box: np.empty(box[1], kind) for box in boxes}


def _block_reads(path: str, blocks: Sequence[SavedBlock], regions: Mapping[Box, np.ndarray]) -> Iterator[BlockRead]:
    for block in blocks:
        shared = [(data, overlap(block, box)) for box, data in regions.items()]
        targets = [(data[(*common[1], ...)], common[0]) for data, common in shared if common is not None]
        if targets:
            yield BlockRead(path, block, targets)


def _describe_altered_files(needed: Sequence[BlockRead], good: Sequence[bool]) -> list[str]:
    altered: dict[str, list[str]] = {}
    for item, is_good in zip(needed, good, strict=True):
        if not is_good:
            altered.setdefault(item.block.file, []).append(item.path)
    return [describe_altered_file(file, paths) for file, paths in altered.items()]


def _make_array(array: SavedArray, want: jax.ShapeDtypeStruct, regions: Mapping[Box, np.ndarray]) -> jax.Array:
    def part(index: Slices) -> Any:
        data = regions[index_to_box(index, array.shape)]
        if is_key(want.dtype):
            return jax.random.wrap_key_data(jnp.asarray(_key_words(data)), impl=_key_impl(want))
        if not data.size:
            return np.empty(data.shape, want.dtype)
        return data.view(jnp.dtype(array.dtype)).astype(want.dtype, copy=False)

    return jax.make_array_from_callback(array.shape, want.sharding, part, dtype=want.dtype)  # pyright: ignore


def _key_words(keys: np.ndarray) -> np.ndarray:
    """Key data: the uint32 words of keys, along a new last dim."""
    return keys.reshape(-1).view(np.uint32).reshape(*keys.shape, keys.itemsize // 4)


def _key_impl(want: jax.ShapeDtypeStruct) -> Any:
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(partial(jax.random.key, impl=name), 0).dtype: name for name in names}[want.dtype]


def _bytes(data: np.ndarray) -> memoryview:
    return data.reshape(-1).view(np.uint8).data


# Writes this process's blocks of a state: copied from the devices first, then hashed and written in a thread.


@dataclass(frozen=True, slots=True)
class HostBlock:
    """A block in host memory, before it is written.

    Attributes:
      path: Path of its array in the state.
      start: First index in the array, for each dim.
      shape: Shape of the block.
      content: Its bytes.
    """

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    content: memoryview


def copy_to_host(state: Mapping[str, jax.Array]) -> list[HostBlock]:
    """Copies the blocks that this process writes to the host, since the next step may donate the arrays.

    Args:
      state: Path to array, the same on all processes.
    """
    parts = [
        part for number, (path, leaf) in enumerate(state.items()) for part in _regions_to_write(path, leaf, number)
    ]
    for _, _, data, _ in parts:
        data.copy_to_host_async()  # starts all copies before waiting for the first
    return [
        block
        for path, region, data, boxes in parts
        for block in _split_into_blocks(path, region, _copy_shard_to_host(data), boxes)
    ]


def write(file: Path, process: int, parts: Sequence[HostBlock]) -> dict[str, list[SavedBlock]]:
    """Writes blocks contiguously to a file, with fsync, and returns them by path.

    Raises:
      OSError: If they cannot be written: the disk is full.
    """
    ends = [0, *itertools.accumulate(part.content.nbytes for part in parts)]
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def put(part: HostBlock, offset: int) -> SavedBlock:
        block = SavedBlock(process, offset, part.content.nbytes, part.start, part.shape, digest(part.content))
        total = 0
        while total < part.content.nbytes:
            total += os.pwrite(handle, part.content[total:], offset + total)
        return block

    try:
        if ends[-1] < SMALL:
            blocks = [put(part, offset) for part, offset in zip(parts, ends, strict=False)]
        else:
            with ThreadPoolExecutor(WORKERS) as workers:
                blocks = list(workers.map(put, parts, ends))
        os.fsync(handle)
    finally:
        os.close(handle)
    result: dict[str, list[SavedBlock]] = {}
    for part, record in zip(parts, blocks, strict=True):
        result.setdefault(part.path, []).append(record)
    return result


def _regions_to_write(path: str, leaf: jax.Array, number: int) -> Iterator[tuple[str, Box, jax.Array, list[Box]]]:
    """Yields (path, region, its data on a device, boxes) for the regions of an array that this process writes."""
    process, data = jax.process_index(), jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf
    holders: dict[Box, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(index_to_box(index, leaf.shape), set()).add(device.process_index)
    shards: dict[Box, list[jax.Array]] = {}
    for shard in data.addressable_shards:
        shards.setdefault(index_to_box(shard.index, leaf.shape), []).append(shard.data)
    for region, copies in shards.items():
        boxes, writers = list(cut_boxes(region[1], leaf.dtype.itemsize)), sorted(holders[region])
        # each array starts with another process: else the first process would write all small arrays
        turn = (writers.index(process) + number) % len(writers)
        first, last = (len(boxes) * position // len(writers) for position in (turn, turn + 1))
        if first < last:
            yield path, region, copies[number % len(copies)], boxes[first:last]


def _split_into_blocks(path: str, region: Box, data: np.ndarray, boxes: list[Box]) -> Iterator[HostBlock]:
    for start, shape in boxes:
        part = data[(*(slice(first, first + size) for first, size in zip(start, shape, strict=True)), ...)]
        content = part.reshape(-1).view(np.uint8).data  # no copy: a box is contiguous
        yield HostBlock(path, tuple(map(sum, zip(region[0], start, strict=True))), shape, content)


def _copy_shard_to_host(data: jax.Array) -> np.ndarray:
    """Copies an array of one device to new host memory, in C order."""
    value = np.asarray(data)
    # on a CPU device NumPy shares the device's memory, which the next step may reuse
    shared = value.size and value.ctypes.data == data.unsafe_buffer_pointer()
    return value.copy(order="C") if shared else np.ascontiguousarray(value)


# Flattens a state to path → array, so that a checkpoint does not depend on Python classes.


def flatten(state: object) -> dict[str, Any]:
    """Flattens a state to a dict from path, such as `params/blocks/mlp/up`, to array."""
    return {format_path(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def unflatten(like: object, arrays: Mapping[str, object]) -> Any:
    """Rebuilds the tree of `like` from arrays by path."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(tree, [arrays[format_path(keys)] for keys, _ in leaves])


def describe(state: object) -> dict[str, SavedArray]:
    """Shape, dtype and bytes of every array of a state, which may be abstract, by path."""
    return {
        path: SavedArray(tuple(leaf.shape), str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
        for path, leaf in flatten(state).items()
    }
