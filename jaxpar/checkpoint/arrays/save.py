"""Writes this process's blocks of a state: copied from the devices first, then hashed and written in a thread."""

import itertools
import os
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import jax
import numpy as np

from jaxpar.checkpoint.arrays.blocks import SMALL, WORKERS, Block, Box, cut, digest
from jaxpar.checkpoint.arrays.regions import is_key, region_of


@dataclass(frozen=True, slots=True)
class Copied:
    """A block in the host's memory, before it is written.

    Attributes:
      path: Of its array in the state.
      start: Its first index there.
      shape: Its dims.
      content: Its bytes.
    """

    path: str
    start: tuple[int, ...]
    shape: tuple[int, ...]
    content: memoryview


def copied(state: Mapping[str, jax.Array]) -> list[Copied]:
    """Returns the blocks that this process writes, copied: the next step may take the arrays' memory over.

    Args:
      state: Path to array, the same on all processes.
    """
    mine = [part for number, (path, leaf) in enumerate(state.items()) for part in _parts(path, leaf, number)]
    for _, _, data, _ in mine:
        data.copy_to_host_async()  # all of them, before the first is waited for
    return [each for path, region, data, boxes in mine for each in _cut(path, region, _on_host(data), boxes)]


def write(file: Path, process: int, parts: Sequence[Copied]) -> dict[str, list[Block]]:
    """Writes blocks one after the other, waits until they are on the disk, and returns them by path.

    Raises:
      OSError: If they cannot be written: the disk is full.
    """
    ends = [0, *itertools.accumulate(part.content.nbytes for part in parts)]
    handle = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o666)

    def put(part: Copied, at: int) -> Block:
        made = Block(process, at, part.content.nbytes, part.start, part.shape, digest(part.content))
        done = 0
        while done < part.content.nbytes:
            done += os.pwrite(handle, part.content[done:], at + done)
        return made

    try:
        if ends[-1] < SMALL:
            blocks = [put(part, at) for part, at in zip(parts, ends, strict=False)]
        else:
            with ThreadPoolExecutor(WORKERS) as workers:
                blocks = list(workers.map(put, parts, ends))
        os.fsync(handle)
    finally:
        os.close(handle)
    found: dict[str, list[Block]] = {}
    for part, block in zip(parts, blocks, strict=True):
        found.setdefault(part.path, []).append(block)
    return found


def _parts(path: str, leaf: jax.Array, number: int) -> Iterator[tuple[str, Box, jax.Array, list[Box]]]:
    """Yields regions of an array of which this process writes blocks: where, its data on a device, and the blocks."""
    here, data = jax.process_index(), jax.random.key_data(leaf) if is_key(leaf.dtype) else leaf
    holders: dict[Box, set[int]] = {}
    for device, index in leaf.sharding.devices_indices_map(leaf.shape).items():
        holders.setdefault(region_of(index, leaf.shape), set()).add(device.process_index)
    shards: dict[Box, list[jax.Array]] = {}
    for shard in data.addressable_shards:
        shards.setdefault(region_of(shard.index, leaf.shape), []).append(shard.data)
    for region, copies in shards.items():
        boxes, among = list(cut(region[1], leaf.dtype.itemsize)), sorted(holders[region])
        # from the second array on, others begin: else of small arrays the first process would write all
        turn = (among.index(here) + number) % len(among)
        first, last = (len(boxes) * each // len(among) for each in (turn, turn + 1))
        if first < last:
            yield path, region, copies[number % len(copies)], boxes[first:last]


def _cut(path: str, region: Box, data: np.ndarray, boxes: list[Box]) -> Iterator[Copied]:
    for start, shape in boxes:
        part = data[(*(slice(first, first + size) for first, size in zip(start, shape, strict=True)), ...)]
        content = part.reshape(-1).view(np.uint8).data  # no copy: a box lies in one piece
        yield Copied(path, tuple(map(sum, zip(region[0], start, strict=True))), shape, content)


def _on_host(data: jax.Array) -> np.ndarray:
    """Returns an array of one device in memory of its own, in C order."""
    value = np.asarray(data)
    # of a processor's device NumPy sees the memory itself, which the next step takes over
    shared = value.size and value.ctypes.data == data.unsafe_buffer_pointer()
    return value.copy(order="C") if shared else np.ascontiguousarray(value)
