"""Reads the blocks that this process needs, hashing each as it is read, and puts arrays where their shardings say."""

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

from jaxpar.checkpoint.arrays.blocks import WORKERS, Block, Box, read, told
from jaxpar.checkpoint.arrays.regions import Slices, is_key, overlap, region_of
from jaxpar.checkpoint.manifest import Array, Manifest

AT_ONCE = 4 * 2**30  # bytes of arrays in the host's memory, on their way to the devices


@dataclass(frozen=True, slots=True)
class Needed:
    """A block of a file, and what it is needed for.

    Attributes:
      path: Of its array.
      block: The block.
      targets: Parts of this process's regions, and the indices into the block of what belongs there.
    """

    path: str
    block: Block
    targets: Sequence[tuple[np.ndarray, Slices]]


def load(
    folder: Path, made: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]
) -> tuple[dict[str, jax.Array], list[str]]:
    """Returns arrays of a checkpoint, each where its sharding says, and what is wrong with the files.

    Args:
      folder: The checkpoint.
      made: Its list.
      wanted: Path to shape, dtype and sharding of those that are read; another dtype is converted to.

    Returns:
      Path to array; nothing to rely on if a file is damaged.
      A line for each file that is altered or cannot be read: of its bytes that this process needs.
    """
    found: dict[str, jax.Array] = {}
    wrong: list[str] = []
    with contextlib.ExitStack() as stack, ThreadPoolExecutor(WORKERS) as workers:
        files = _Files(folder, stack)
        for names in _groups(made.arrays, wanted):
            regions = {name: _regions(made.arrays[name], wanted[name]) for name in names}
            needed = [each for name in names for each in _needed(name, made.blocks.get(name, ()), regions[name])]
            wrong += files.open(needed)
            if wrong or (wrong := _said(needed, list(workers.map(files.fill, needed)))):
                break
            found |= {name: _placed(made.arrays[name], wanted[name], regions[name]) for name in names}
    return found, wrong


class _Files:
    """The files of a checkpoint, opened when they are first needed."""

    def __init__(self, folder: Path, stack: contextlib.ExitStack):
        self.folder, self.stack = folder, stack
        self.handles: dict[str, int] = {}

    def open(self, needed: Sequence[Needed]) -> list[str]:
        """Opens files, and returns a line for each that cannot be."""
        wrong = []
        for file in {each.block.file: None for each in needed if each.block.file not in self.handles}:
            try:
                self.handles[file] = os.open(self.folder / file, os.O_RDONLY)
                self.stack.callback(os.close, self.handles[file])
            except OSError as error:
                wrong.append(f"{file} cannot be read: {error.strerror}")
        return wrong

    def fill(self, each: Needed) -> bool:
        """Reads a block to where it is needed; returns whether it is as it was written."""
        handle, block = self.handles[each.block.file], each.block
        first, _ = each.targets[0]
        try:
            # the usual case, the same layout again: the block is read to where it stays
            if len(each.targets) == 1 and first.shape == block.shape and first.flags.c_contiguous:
                return read(handle, block, _bytes(first))
            whole = np.empty(block.shape, first.dtype)
            good = read(handle, block, _bytes(whole))
        except OSError:
            return False
        for target, inside in each.targets:
            target[...] = whole[inside]
        return good


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
    """Returns memory for each region of an array that devices of this process hold."""
    size = array.bytes // math.prod(array.shape) if array.bytes else want.dtype.itemsize
    kind = np.dtype(f"u{size}" if size in (1, 2, 4, 8) else f"V{size}")  # bytes are moved, whatever they mean
    indices = want.sharding.addressable_devices_indices_map(array.shape).values()  # pyright: ignore
    boxes = dict.fromkeys(region_of(index, array.shape) for index in indices if index is not None)
    return {box: np.empty(box[1], kind) for box in boxes}


def _needed(path: str, blocks: Sequence[Block], regions: Mapping[Box, np.ndarray]) -> Iterator[Needed]:
    for block in blocks:
        shared = [(data, overlap(block, box)) for box, data in regions.items()]
        targets = [(data[(*common[1], ...)], common[0]) for data, common in shared if common is not None]
        if targets:
            yield Needed(path, block, targets)


def _said(needed: Sequence[Needed], good: Sequence[bool]) -> list[str]:
    bad: dict[str, list[str]] = {}
    for each, fine in zip(needed, good, strict=True):
        if not fine:
            bad.setdefault(each.block.file, []).append(each.path)
    return [told(file, paths) for file, paths in bad.items()]


def _placed(array: Array, want: jax.ShapeDtypeStruct, regions: Mapping[Box, np.ndarray]) -> jax.Array:
    def part(index: Slices) -> Any:
        data = regions[region_of(index, array.shape)]
        if is_key(want.dtype):
            return jax.random.wrap_key_data(jnp.asarray(_numbers(data)), impl=_impl(want))
        if not data.size:
            return np.empty(data.shape, want.dtype)
        return data.view(jnp.dtype(array.dtype)).astype(want.dtype, copy=False)

    return jax.make_array_from_callback(array.shape, want.sharding, part, dtype=want.dtype)  # pyright: ignore


def _numbers(keys: np.ndarray) -> np.ndarray:
    """Returns the numbers that keys consist of, along one more dim."""
    return keys.reshape(-1).view(np.uint32).reshape(*keys.shape, keys.itemsize // 4)


def _impl(want: jax.ShapeDtypeStruct) -> Any:
    names = ("threefry2x32", "rbg", "unsafe_rbg")
    return {jax.eval_shape(partial(jax.random.key, impl=name), 0).dtype: name for name in names}[want.dtype]


def _bytes(data: np.ndarray) -> memoryview:
    return data.reshape(-1).view(np.uint8).data
