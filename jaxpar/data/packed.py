"""Packed tokens with a hash manifest: truncated or altered files are detected.

    tokens-bytes-256-0f3a.bin     the tokens, one after the other
    tokens-bytes-256-0f3a.json    b7c9...e1: BLAKE2b of the rest of this file
                                  {"text": "0f3a", "size": 96468992, "parts": ["9d...", "41..."], ...}

As with a checkpoint, a truncated, zeroed or altered file differs from its manifest, and the manifest's first line is
its own hash. Parts are hashed in parallel, in small reads.

The highest two bits of a token are flags: the loss ignores this token; a document begins here. So one file holds ids,
mask and document boundaries, and one manifest covers it.

    uint16   unlearned? first? 14 bits of id        a tokenizer of up to 16,384 tokens
    uint32   unlearned? first? 30 bits of id        a larger one
"""

import hashlib
import json
import os
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import pydantic

from jaxpar.errors import JaxparError, refuse
from jaxpar.files import content_hash, sync

FORMAT = 1
PART = 2**26  # bytes per hash
_STRIDE = 2**20  # bytes per read


@dataclass(frozen=True, kw_only=True)
class Packed:
    """The manifest of a file of tokens.

    Attributes:
      text: Digest of the text and of the settings that decide its tokens.
      mark: Digest of names, sizes and modification times of the text's files and of these settings, or "".
      dtype: Dtype of a token.
      size: Bytes of the file.
      parts: Hexadecimal BLAKE2b (32 bytes) of each `PART` bytes.
      tokenizer: BLAKE2b of the tokenizer's file, or "".
      format: Version of this manifest's format.
      marked: Whether tokens have flags in their highest bits, see `tokenizers.marks`.
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


def manifest_path(file: Path) -> Path:
    """Path of the manifest of a file of tokens."""
    return file.with_suffix(".json")


def write_tokens(file: Path, chunks: Iterable[bytes]) -> tuple[int, tuple[str, ...]]:
    """Writes a file atomically, with fsync; returns its size and the hashes of its parts.

    Raises:
      JaxparError: If it cannot be written.
    """
    partial = file.with_suffix(f".{os.uname().nodename}-{os.getpid()}.part")
    try:
        with partial.open("wb", buffering=0) as out:
            writer = HashingWriter(out)
            for chunk in chunks:
                writer.write(chunk)
            os.fsync(out.fileno())
        partial.replace(file)
        sync(file.parent)
    except OSError as error:
        raise write_error(partial, error) from error
    finally:
        partial.unlink(missing_ok=True)
    return writer.size, writer.parts


class HashingWriter:
    """Hashes the parts of a file while it writes them.

    Args:
      out: The file, open for writing at its end.
      parts: Hashes of the complete parts already in the file.
      rest: The bytes in the file after these parts, fewer than a part has.
    """

    def __init__(self, out: BinaryIO, parts: Iterable[str] = (), rest: bytes = b""):
        self._out, self.part_hashes = out, [*parts]
        self._digest, self._held = _new_digest(), len(rest)
        self._digest.update(rest)

    @property
    def size(self) -> int:
        """Bytes of the file."""
        return len(self.part_hashes) * PART + self._held

    @property
    def parts(self) -> tuple[str, ...]:
        """The hashes of all parts; the last may be shorter."""
        return (*self.part_hashes, self._digest.hexdigest()) if self._held else tuple(self.part_hashes)

    def write(self, chunk: Any) -> None:
        """Writes a chunk: bytes, or an array."""
        view = memoryview(chunk).cast("B")
        while view:
            piece = view[: PART - self._held]
            _write_all(self._out, piece)
            self._digest.update(piece)
            self._held += len(piece)
            view = view[len(piece) :]
            if self._held == PART:
                self.part_hashes.append(self._digest.hexdigest())
                self._digest, self._held = _new_digest(), 0


def write_error(part: Path, error: OSError) -> JaxparError:
    """The error for tokens that cannot be written."""
    got = f"{error.filename or part}: {error.strerror}"
    return refuse(got, rule="tokens are packed into the run folder", fix="free disk space, or another run.dir")


def write_manifest(file: Path, packed: Packed) -> None:
    """Writes the manifest of a file of tokens atomically."""
    content = json.dumps(asdict(packed)).encode() + b"\n"
    partial = file.with_suffix(f".{os.uname().nodename}-{os.getpid()}.json.part")
    try:
        partial.write_bytes(content_hash(content).encode() + b"\n" + content)
        sync(partial)
        partial.replace(manifest_path(file))
        sync(file.parent)
    except OSError as error:
        raise write_error(partial, error) from error


def read_manifest(path: Path) -> Packed:
    """Reads the manifest of a file of tokens.

    Raises:
      JaxparError: If there is none, or it is altered.
    """
    rule, fix = "a list of packed tokens is as it was written", f"rm {path}: the text is packed again"
    try:
        first, _, content = path.read_bytes().partition(b"\n")
        manifest = _READER.validate_json(content)
    except OSError as error:
        raise refuse(f"{path.name}: {error.strerror}", rule=rule, fix=fix) from error
    except pydantic.ValidationError as error:
        raise refuse(f"{path.name} is altered", rule=rule, fix=fix) from error
    if first != content_hash(content).encode() or manifest.format != FORMAT:
        raise refuse(f"{path.name} is altered", rule=rule, fix=fix)
    return manifest


def find_damage(file: Path, packed: Packed, read: Callable[[int], None] = lambda _: None) -> str:
    """Describes how a file differs from its manifest; "" if every byte is as written.

    Args:
      file: The file of tokens.
      packed: Its manifest.
      read: Called with the number of bytes after each part.
    """
    try:
        size = file.stat().st_size
        if size != packed.size:
            return f"{file.name} has {size} bytes, {packed.size} were written"
        with ThreadPoolExecutor(max(2, min(16, os.cpu_count() or 1))) as workers:  # hashing lets other threads run
            hashes = workers.map(lambda index: hash_part(file, index), range(len(packed.parts)))
            for actual, expected in zip(hashes, packed.parts, strict=True):
                if actual != expected:
                    return f"{file.name} is altered"
                read(min(PART, size))
    except OSError as error:
        return f"{file.name}: {error.strerror}"
    return ""


def hash_part(file: Path, index: int) -> str:
    """Hash of the index-th part of a file."""
    digest, remaining = _new_digest(), PART
    with file.open("rb", buffering=0) as stream:
        stream.seek(index * PART)
        while remaining and (block := stream.read(min(remaining, _STRIDE))):
            digest.update(block)
            remaining -= len(block)
    return digest.hexdigest()


def hash_file(file: Path) -> str:
    """Hash of a small file; "" if it cannot be read."""
    try:
        return content_hash(file.read_bytes())
    except OSError:
        return ""


def find_packed(folder: Path, pattern: str) -> list[tuple[Path, Packed]]:
    """Returns the files of tokens in a folder that have a valid manifest, each with its manifest."""
    files = []
    for path in sorted(folder.glob(f"{pattern}.json")):
        try:
            files.append((path.with_suffix(".bin"), read_manifest(path)))
        except JaxparError:  # reported when that file is opened
            continue
    return files


def _write_all(out, view: memoryview) -> None:
    while view:
        view = view[out.write(view) :]


def _new_digest():
    return hashlib.blake2b(digest_size=32)


def token_dtype(tokens: int) -> np.dtype:
    """The dtype that holds the ids of a vocabulary of this size and both flags."""
    return np.dtype(np.uint16 if tokens <= 2**14 else np.uint32)


def _bits(dtype: np.dtype) -> tuple[int, int]:
    bits = 8 * dtype.itemsize
    return 1 << (bits - 1), 1 << (bits - 2)


def set_flags(ids: np.ndarray, dtype: np.dtype, *, first: bool, learned: np.ndarray | None = None) -> np.ndarray:
    """Sets the flags of token ids.

    Args:
      ids: Tokens of a piece. Shape [n].
      dtype: The result's dtype, from `token_dtype`.
      first: Whether a document begins with the first of them.
      learned: Whether the loss counts each token; None means all. Shape [n], bool.
    """
    unlearned_bit, begin_bit = _bits(dtype)
    tokens = ids.astype(dtype)
    if learned is not None:
        tokens[~learned] |= unlearned_bit
    if first and len(tokens):
        tokens[0] |= begin_bit
    return tokens


def document_starts(tokens: np.ndarray) -> np.ndarray:
    """Whether a document begins at each token. Shape [...], bool."""
    return (tokens & _bits(tokens.dtype)[1]) != 0


def ignored_by_loss(tokens: np.ndarray) -> np.ndarray:
    """Whether the loss ignores each token. Shape [...], bool."""
    return (tokens & _bits(tokens.dtype)[0]) != 0


def token_ids(tokens: np.ndarray) -> np.ndarray:
    """Token ids without the flags. Shape [...], int32."""
    return (tokens & (_bits(tokens.dtype)[1] - 1)).astype(np.int32)
