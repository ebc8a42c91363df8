"""Blocks: boxes of arrays, each with its place in a file and its hash. Imports no JAX."""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = "arrays"  # subfolder of a checkpoint, with a file per writing process
LARGEST = 16 * 2**20  # bytes of a block: small enough to balance threads, large enough for a short MANIFEST
WORKERS = 4  # threads; hashing, reading and writing release the GIL
SMALL = 2**20  # bytes below which starting threads takes longer than the work

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape within an array


@dataclass(frozen=True, slots=True)
class SavedBlock:
    """A box of an array, stored contiguously in a file.

    Attributes:
      process: Index of the process that wrote it, which names the file.
      at: Byte offset in the file.
      bytes: Number of bytes.
      start: First index in the array, for each dim.
      shape: Shape of the box; its bytes are in C order.
      hash: Hexadecimal BLAKE2b (16 bytes) of its bytes.
    """

    process: int
    at: int
    bytes: int
    start: tuple[int, ...]
    shape: tuple[int, ...]
    hash: str

    @property
    def file(self) -> str:
        """Path of its file within the checkpoint."""
        return process_file(self.process)


def process_file(process: int) -> str:
    """Path within a checkpoint of the file that a process writes.

    >>> process_file(3)
    'arrays/00003'
    """
    return f"{FOLDER}/{process:05d}"


def cut_boxes(shape: tuple[int, ...], itemsize: int, largest: int = LARGEST) -> Iterator[Box]:
    """Yields boxes that fill an array in C order, each at most `largest` bytes or one element.

    >>> list(cut_boxes((3, 4), 1, largest=8))
    [((0, 0), (2, 4)), ((2, 0), (1, 4))]
    """
    size = math.prod(shape) * itemsize
    if not size:
        return
    if size <= largest or not shape:
        yield (0,) * len(shape), shape
        return
    row = size // shape[0]
    if row > largest:
        for index in range(shape[0]):
            yield from (((index, *start), (1, *inner)) for start, inner in cut_boxes(shape[1:], itemsize, largest))
        return
    rows, inner_shape = largest // row, shape[1:]
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * len(inner_shape)), (min(rows, shape[0] - first), *inner_shape)


def digest(content: bytes | memoryview) -> str:
    """Hash of a block."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def sizes(blocks: Mapping[str, Sequence[SavedBlock]]) -> dict[str, int]:
    """Path to size in bytes of the files that hold the blocks."""
    result: dict[str, int] = {}
    for block in _all_blocks(blocks):
        result[block.file] = max(result.get(block.file, 0), block.at + block.bytes)
    return result


def find_misfit(shapes: Mapping[str, tuple[tuple[int, ...], int]], blocks: Mapping[str, Sequence[SavedBlock]]) -> str:
    """Checks that blocks fill their arrays, and their files without a gap; describes the first error, else "".

    Args:
      shapes: Path to (shape, bytes) of each array.
      blocks: Path to the blocks of each array.
    """
    for path, array_blocks in blocks.items():
        shape, size = shapes.get(path, ((), 0))
        is_inside = all(_is_within(item, shape) for item in array_blocks)
        if not is_inside or sum(item.bytes for item in array_blocks) != size:
            return f"the blocks of {path!r:.100} do not fill it"
        if any(item.bytes * math.prod(shape) != size * math.prod(item.shape) for item in array_blocks):
            return f"a block of {path!r:.100} has another size than its shape says"
    if missing := [path for path, (_, size) in shapes.items() if size and path not in blocks]:
        return f"{missing[0]!r:.100} has no blocks"
    ends: dict[str, int] = {}
    for item in sorted(_all_blocks(blocks), key=lambda block: (block.process, block.at)):
        if item.at != ends.get(item.file, 0):
            return f"{item.file} has a gap at byte {ends.get(item.file, 0)}"
        ends[item.file] = item.at + item.bytes
    return ""


def read_block(handle: int, block: SavedBlock, into: memoryview) -> bool:
    """Reads the bytes of a block into memory, and returns whether their hash is right.

    Raises:
      OSError: If they cannot be read.
    """
    total = 0
    while total < block.bytes:
        count = os.preadv(handle, [into[total:]], block.at + total)
        if not count:
            return False
        total += count
    return digest(into) == block.hash


def find_altered_files(folder: Path, blocks: Mapping[str, Sequence[SavedBlock]], files: Iterable[str]) -> list[str]:
    """Returns a line for each of these files that has an altered block or cannot be read."""
    lines: dict[str, str] = {}
    for file in files:
        pairs = [(path, block) for path, group in blocks.items() for block in group if block.file == file]
        try:
            altered_paths = _find_altered_arrays(folder / file, pairs)
        except OSError as error:
            lines[file] = f"{file} cannot be read: {error.strerror}"
            continue
        if altered_paths:
            lines[file] = describe_altered_file(file, altered_paths)
    return list(lines.values())


def describe_altered_file(file: str, paths: Sequence[str]) -> str:
    """The line for a file in which blocks of these arrays are altered."""
    suffix = f", and {len(paths) - 1} blocks more" if paths[1:] else ""
    return f"{file} is altered: {paths[0]}{suffix}"


def _find_altered_arrays(path: Path, pairs: Sequence[tuple[str, SavedBlock]]) -> list[str]:
    handle = os.open(path, os.O_RDONLY)

    def is_good(item: tuple[str, SavedBlock]) -> bool:
        return read_block(handle, item[1], memoryview(bytearray(item[1].bytes)))

    try:
        if sum(item.bytes for _, item in pairs) < SMALL:
            flags = [is_good(item) for item in pairs]
        else:
            with ThreadPoolExecutor(WORKERS) as workers:
                flags = list(workers.map(is_good, pairs))
    finally:
        os.close(handle)
    return [name for (name, _), is_good_block in zip(pairs, flags, strict=True) if not is_good_block]


def _all_blocks(blocks: Mapping[str, Sequence[SavedBlock]]) -> Iterator[SavedBlock]:
    for array_blocks in blocks.values():
        yield from array_blocks


def _is_within(block: SavedBlock, shape: tuple[int, ...]) -> bool:
    if min((block.process, block.at, block.bytes, *block.start, *block.shape)) < 0:
        return False
    if not len(block.start) == len(block.shape) == len(shape):
        return False
    return all(first + size <= dim for first, size, dim in zip(block.start, block.shape, shape, strict=True))
