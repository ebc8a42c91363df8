"""A file of packed tokens that cannot lie: beside it lies what every part of it must be.

    tokens-bytes-256-0f3a.bin     the tokens, one after the other
    tokens-bytes-256-0f3a.json    b7c9...e1: BLAKE2b of all that follows
                                  {"text": "0f3a", "size": 96468992, "parts": ["9d...", "41..."], ...}

As with a checkpoint, a file that is cut off, zeroed or altered differs from the list, and the list is covered by its
first line. Parts are hashed at the same time, and none is held in memory.
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import pydantic

from jaxpar.errors import JaxparError, refuse
from jaxpar.files import sync

FORMAT = 1
PART = 2**26  # bytes that have a hash of their own
_STRIDE = 2**20  # bytes that are read at once


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The facts about a file of tokens.

    Attributes:
      text: Digest of the text.
      mark: Of the text's files when it was read, or "".
      dtype: Of a token.
      size: Bytes of the file.
      parts: Hexadecimal BLAKE2b (32 bytes) of each `PART` bytes.
      tokenizer: BLAKE2b of the tokenizer's file, or "".
      format: Of this list.
      marked: Whether tokens have marks in their highest bits, see `tokenizers.marks`.
    """

    text: str
    mark: str
    dtype: str
    size: int
    parts: tuple[str, ...]
    tokenizer: str = ""
    format: int = FORMAT
    marked: bool = False


_READER = pydantic.TypeAdapter(Packed)


def list_of(file: Path) -> Path:
    """Returns where the list of a file of tokens lies."""
    return file.with_suffix(".json")


def write_tokens(file: Path, chunks: Iterable[bytes]) -> tuple[int, tuple[str, ...]]:
    """Writes a file and returns its size and the hashes of its parts; it is on the disk, under its name, or not at all.

    Raises:
      JaxparError: If it cannot be written.
    """
    part = file.with_suffix(f".{os.uname().nodename}-{os.getpid()}.part")
    try:
        with part.open("wb", buffering=0) as out:
            hashed = Hashed(out)
            for chunk in chunks:
                hashed.write(chunk)
            os.fsync(out.fileno())
        part.replace(file)
        sync(file.parent)
    except OSError as error:
        raise full(part, error) from error
    finally:
        part.unlink(missing_ok=True)
    return hashed.size, hashed.parts


class Hashed:
    """A file whose parts are hashed while they are written.

    Args:
      out: The file, open for writing at its end.
      parts: Hashes of the parts that it has already.
      rest: What it has after them, less than a part.
    """

    def __init__(self, out: BinaryIO, parts: Iterable[str] = (), rest: bytes = b""):
        self._out, self.whole = out, [*parts]
        self._digest, self._held = _new(), len(rest)
        self._digest.update(rest)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.whole) * PART + self._held

    @property
    def parts(self) -> tuple[str, ...]:
        """The hashes of all parts; the last may be shorter."""
        return (*self.whole, self._digest.hexdigest()) if self._held else tuple(self.whole)

    def write(self, chunk: Any) -> None:
        """Writes a chunk: bytes, or an array."""
        view = memoryview(chunk).cast("B")
        while view:
            some = view[: PART - self._held]
            _write_all(self._out, some)
            self._digest.update(some)
            self._held += len(some)
            view = view[len(some) :]
            if self._held == PART:
                self.whole.append(self._digest.hexdigest())
                self._digest, self._held = _new(), 0


def full(part: Path, error: OSError) -> JaxparError:
    """Returns the refusal of tokens that cannot be written."""
    got = f"{error.filename or part}: {error.strerror}"
    return refuse(got, rule="tokens are packed into the run folder", fix="free some, or another run.dir")


def write_list(file: Path, packed: Packed) -> None:
    """Writes the list of a file of tokens; a reader sees the old one or the new one."""
    rest = json.dumps(asdict(packed)).encode() + b"\n"
    part = file.with_suffix(f".{os.uname().nodename}-{os.getpid()}.json.part")
    try:
        part.write_bytes(_digest(rest).encode() + b"\n" + rest)
        sync(part)
        part.replace(list_of(file))
        sync(file.parent)
    except OSError as error:
        raise full(part, error) from error


def read_list(path: Path) -> Packed:
    """Returns what a list says.

    Raises:
      JaxparError: If there is none, or it is altered.
    """
    rule, fix = "a list of packed tokens is as it was written", f"rm {path}: the text is packed again"
    try:
        first, _, rest = path.read_bytes().partition(b"\n")
        made = _READER.validate_json(rest)
    except OSError as error:
        raise refuse(f"{path.name}: {error.strerror}", rule=rule, fix=fix) from error
    except pydantic.ValidationError as error:
        raise refuse(f"{path.name} is altered", rule=rule, fix=fix) from error
    if first != _digest(rest).encode() or made.format != FORMAT:
        raise refuse(f"{path.name} is altered", rule=rule, fix=fix)
    return made


def differs(file: Path, packed: Packed, read: Callable[[int], None] = lambda _: None) -> str:
    """Returns in words how a file differs from its list, or "" where every byte is as it was written.

    Args:
      file: Of tokens.
      packed: Its list.
      read: Is told how many bytes were read.
    """
    try:
        size = file.stat().st_size
        if size != packed.size:
            return f"{file.name} has {size} bytes, {packed.size} were written"
        with ThreadPoolExecutor(max(2, min(16, os.cpu_count() or 1))) as workers:  # hashing lets other threads run
            found = workers.map(lambda index: hash_part(file, index), range(len(packed.parts)))
            for one, other in zip(found, packed.parts, strict=True):
                if one != other:
                    return f"{file.name} is altered"
                read(min(PART, size))
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    return ""


def hash_part(file: Path, index: int) -> str:
    """Returns the hash of the index-th part of a file."""
    digest, left = _new(), PART
    with file.open("rb", buffering=0) as stream:
        stream.seek(index * PART)
        while left and (block := stream.read(min(left, _STRIDE))):
            digest.update(block)
            left -= len(block)
    return digest.hexdigest()


def hash_of(file: Path) -> str:
    """Returns the hash of a small file, or "" if it cannot be read."""
    try:
        return _digest(file.read_bytes())
    except OSError:
        return ""


def listed(folder: Path, pattern: str) -> list[tuple[Path, Packed]]:
    """Returns the files of tokens in a folder that have a good list, and what it says."""
    found = []
    for path in sorted(folder.glob(f"{pattern}.json")):
        try:
            found.append((path.with_suffix(".bin"), read_list(path)))
        except JaxparError:  # it is told where that file is wanted
            continue
    return found


def _write_all(out, view: memoryview) -> None:
    while view:
        view = view[out.write(view) :]


def _new():
    return hashlib.blake2b(digest_size=32)


def _digest(text: bytes) -> str:
    return hashlib.blake2b(text, digest_size=32).hexdigest()
