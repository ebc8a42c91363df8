"""Writes this process's blocks of a state: copied from the devices first, then hashed and written in a thread."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxpar.checkpoint.arrays.blocks import SMALL, WORKERS, Block, Box, cut_boxes, digest
from jaxpar.checkpoint.arrays.regions import is_key, region_of


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
    parts = [part for number, (path, leaf) in enumerate(state.items()) for part in _parts(path, leaf, number)]
    for _, _, data, _ in parts:
        data.copy_to_host_async()  # starts all copies before waiting for the first
    return [block for path, region, data, boxes in parts for block in _cut(path, region, _on_host(data), boxes)]


def write(file: Path, process: int, parts: Sequence[HostBlock]) -> dict[str, list[Block]]:
    """Writes blocks contiguously to a file, with fsync, and returns them by path.

    Raises:
      OSError: If they cannot be written: the disk is full.
    """
    ends = [0, *itertools.accumulate(part.content.nbytes for part in parts)]
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def put(part: HostBlock, offset: int) -> Block:
        block = Block(process, offset, part.content.nbytes, part.start, part.shape, digest(part.content))
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
    result: dict[str, list[Block]] = {}
    for part, record in zip(parts, blocks, strict=True):
        result.setdefault(part.path, []).append(record)
    return result


def _parts(path: str, leaf: jax.Array, number: int) -> Iterator[tuple[str, Box, jax.Array, list[Box]]]:
    """Yields (path, region, its data on a device, boxes) for the regions of an array that this process writes."""
    process, data = jax.process_index(), jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf
    holders: dict[Box, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(region_of(index, leaf.shape), set()).add(device.process_index)
    shards: dict[Box, list[jax.Array]] = {}
    for shard in data.addressable_shards:
        shards.setdefault(region_of(shard.index, leaf.shape), []).append(shard.data)
    for region, copies in shards.items():
        boxes, writers = list(cut_boxes(region[1], leaf.dtype.itemsize)), sorted(holders[region])
        # each array starts with another process: else the first process would write all small arrays
        turn = (writers.index(process) + number) % len(writers)
        first, last = (len(boxes) * position // len(writers) for position in (turn, turn + 1))
        if first < last:
            yield path, region, copies[number % len(copies)], boxes[first:last]


def _cut(path: str, region: Box, data: np.ndarray, boxes: list[Box]) -> Iterator[HostBlock]:
    for start, shape in boxes:
        part = data[(*(slice(first, first + size) for first, size in zip(start, shape, strict=True)), ...)]
        content = part.reshape(-1).view(np.uint8).data  # no copy: a box is contiguous
        yield HostBlock(path, tuple(map(sum, zip(region[0], start, strict=True))), shape, content)


def _on_host(data: jax.Array) -> np.ndarray:
    """Copies an array of one device to new host memory, in C order."""
    value = np.asarray(data)
    # on a CPU device NumPy shares the device's memory, which the next step may reuse
    shared = value.size and value.ctypes.data == data.unsafe_buffer_pointer()
    return value.copy(order="C") if shared else np.ascontiguousarray(value)
