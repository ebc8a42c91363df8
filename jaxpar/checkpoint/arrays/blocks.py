"""Blocks: boxes of arrays, each with its place in a file and its hash. Takes no JAX."""

import hashlib
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

FOLDER = "arrays"  # of a checkpoint, with a file for each process that wrote
LARGEST = 16 * 2**20  # bytes: small enough that threads have equal shares, large enough that their list stays short
WORKERS = 4  # threads; hashing, reading and writing let others run
SMALL = 2**20  # bytes that are done sooner than threads are started

Box = tuple[tuple[int, ...], tuple[int, ...]]  # start and shape within an array


@dataclass(frozen=True, slots=True)
class Block:
    """A box of an array that lies in one piece in a file.

    Attributes:
      process: Which wrote it, and so in which file it is.
      at: Its first byte there.
      bytes: How many it has.
      start: Its first index in the array, for each dim.
      shape: Its dims; the bytes are in C order.
      hash: Hexadecimal BLAKE2b of its bytes, of 16 bytes.
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
        return file_of(self.process)


def file_of(process: int) -> str:
    """Returns the path within a checkpoint of the file that a process writes.

    >>> file_of(3)
    'arrays/00003'
    """
    return f"{FOLDER}/{process:05d}"


def cut(shape: tuple[int, ...], itemsize: int, largest: int = LARGEST) -> Iterator[Box]:
    """Yields boxes that fill an array, one after the other in C order, none above `largest` bytes but one element.

    >>> list(cut((3, 4), 1, largest=8))
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
            yield from (((index, *start), (1, *inner)) for start, inner in cut(shape[1:], itemsize, largest))
        return
    rows, rest = largest // row, shape[1:]
    for first in range(0, shape[0], rows):
        yield (first, *(0,) * len(rest)), (min(rows, shape[0] - first), *rest)


def digest(content: bytes | memoryview) -> str:
    """Returns the hash of a block."""
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def sizes(blocks: Mapping[str, Sequence[Block]]) -> dict[str, int]:
    """Returns path to bytes of the files that blocks lie in."""
    found: dict[str, int] = {}
    for each in _all(blocks):
        found[each.file] = max(found.get(each.file, 0), each.at + each.bytes)
    return found


def unfit(shapes: Mapping[str, tuple[tuple[int, ...], int]], blocks: Mapping[str, Sequence[Block]]) -> str:
    """Returns what is wrong with a list of blocks, or "": they fill the arrays, and the files without a gap.

    Args:
      shapes: Path to shape and bytes of each array.
      blocks: Path to the blocks of each array.
    """
    for path, mine in blocks.items():
        shape, size = shapes.get(path, ((), 0))
        boxed = all(_is_within(each, shape) for each in mine)
        if not boxed or sum(each.bytes for each in mine) != size:
            return f"the blocks of {path!r:.100} do not fill it"
        if any(each.bytes * math.prod(shape) != size * math.prod(each.shape) for each in mine):
            return f"a block of {path!r:.100} has another size than its shape says"
    if lost := [path for path, (_, size) in shapes.items() if size and path not in blocks]:
        return f"{lost[0]!r:.100} has no blocks"
    ends: dict[str, int] = {}
    for each in sorted(_all(blocks), key=lambda block: (block.process, block.at)):
        if each.at != ends.get(each.file, 0):
            return f"{each.file} has a gap at byte {ends.get(each.file, 0)}"
        ends[each.file] = each.at + each.bytes
    return ""


def read(handle: int, block: Block, into: memoryview) -> bool:
    """Reads the bytes of a block, and returns whether they are as they were written.

    Raises:
      OSError: If they cannot be read.
    """
    done = 0
    while done < block.bytes:
        count = os.preadv(handle, [into[done:]], block.at + done)
        if not count:
            return False
        done += count
    return digest(into) == block.hash


def altered(folder: Path, blocks: Mapping[str, Sequence[Block]], files: Iterable[str]) -> list[str]:
    """Returns a line for each of these files with a block that is not as it was written, or cannot be read."""
    found: dict[str, str] = {}
    for file in files:
        mine = [(path, each) for path, some in blocks.items() for each in some if each.file == file]
        try:
            bad = _bad(folder / file, mine)
        except OSError as error:
            found[file] = f"{file} cannot be read: {error.strerror}"
            continue
        if bad:
            found[file] = told(file, bad)
    return list(found.values())


def told(file: str, paths: Sequence[str]) -> str:
    """Returns the line for a file with blocks of these arrays that are altered."""
    more = f", and {len(paths) - 1} blocks more" if paths[1:] else ""
    return f"{file} is altered: {paths[0]}{more}"


def _bad(path: Path, mine: Sequence[tuple[str, Block]]) -> list[str]:
    handle = os.open(path, os.O_RDONLY)

    def is_good(each: tuple[str, Block]) -> bool:
        return read(handle, each[1], memoryview(bytearray(each[1].bytes)))

    try:
        if sum(each.bytes for _, each in mine) < SMALL:
            good = [is_good(each) for each in mine]
        else:
            with ThreadPoolExecutor(WORKERS) as workers:
                good = list(workers.map(is_good, mine))
    finally:
        os.close(handle)
    return [name for (name, _), fine in zip(mine, good, strict=True) if not fine]


def _all(blocks: Mapping[str, Sequence[Block]]) -> Iterator[Block]:
    for mine in blocks.values():
        yield from mine


def _is_within(block: Block, shape: tuple[int, ...]) -> bool:
    if min((block.process, block.at, block.bytes, *block.start, *block.shape)) < 0:
        return False
    if not len(block.start) == len(block.shape) == len(shape):
        return False
    return all(first + size <= dim for first, size, dim in zip(block.start, block.shape, shape, strict=True))
