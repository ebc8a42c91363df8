"""Writes tokens resumably: after a kill the next process continues at the exact token.

    tokens-hf-32000-0f3a.begun       the tokens so far
    tokens-hf-32000-0f3a.progress    b7c9...e1: BLAKE2b of the next line
                                     {"place": [0, 1048576, 0], "size": 524288, "parts": ["9d..."]}

Every `EVERY` seconds the tokens are synced, and then the place in the documents that they reach. A process that resumes
verifies the hashes, truncates the tokens after that place, and reads the documents from it on.
"""

import hashlib
import json
import os
import time
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np

from jaxpar.data import packed
from jaxpar.data.documents.piece import Place
from jaxpar.files import sync, write_text

EVERY = 10.0  # seconds between two records of the place
Chunks = Callable[[Place], Iterable[tuple[np.ndarray, Place]]]


def write_tokens(file: Path, chunks: Chunks, say: Callable[[str], None]) -> tuple[int, tuple[str, ...]]:
    """Writes a file, resuming what an earlier process wrote; returns its size and the hashes of its parts.

    Args:
      file: The file; until it is complete its content is in a file with the suffix .begun.
      chunks: Maps a place to an iterable of the tokens from it on, each array with the place after it.
      say: Takes a message if the write is resumed.

    Raises:
      JaxparError: If it cannot be written.
    """
    partial_file, notes = file.with_suffix(".begun"), file.with_suffix(".progress")
    place, size, parts = _resume_point(partial_file, notes)
    if size:
        say(f"packing goes on after {size:,} bytes of tokens that an earlier start has packed")
    try:
        with partial_file.open("r+b" if size else "w+b", buffering=0) as out:
            out.truncate(size)
            out.seek(len(parts) * packed.PART)
            writer, noted_at = packed.HashingWriter(out, parts, out.read()), time.monotonic()
            for chunk, place_after in chunks(place):
                writer.write(chunk)
                if time.monotonic() - noted_at >= EVERY:
                    os.fsync(out.fileno())
                    _write_progress(notes, place_after, writer)
                    noted_at = time.monotonic()
            os.fsync(out.fileno())
        partial_file.replace(file)
        notes.unlink(missing_ok=True)
        sync(file.parent)
    except OSError as error:
        raise packed.write_error(partial_file, error) from error
    return writer.size, writer.parts


def _write_progress(notes: Path, place: Place, hashed: packed.HashingWriter) -> None:
    line = json.dumps({"place": place, "size": hashed.size, "parts": hashed.parts})
    write_text(notes, f"{hashlib.blake2b(line.encode()).hexdigest()}\n{line}\n")
    sync(notes)


def _resume_point(begun: Path, notes: Path) -> tuple[Place, int, tuple[str, ...]]:
    """Returns the place to resume at, the number of verified bytes, and the hashes of their complete parts."""
    start = Place(), 0, ()
    try:
        first, _, line = notes.read_bytes().partition(b"\n")
        if first != hashlib.blake2b(line.strip()).hexdigest().encode():
            return start
        record = json.loads(line)
        if begun.stat().st_size < record["size"]:
            return start
        os.truncate(begun, record["size"])
    except (OSError, ValueError):  # no record, or one that was truncated by a kill
        return start
    parts = tuple(record["parts"])
    manifest = packed.Packed(text="", mark="", dtype="", size=record["size"], parts=parts)
    if packed.find_damage(begun, manifest):  # bytes that did not reach the disk before the machine went down
        return start
    complete = record["size"] // packed.PART
    return Place(*record["place"]), record["size"], parts[:complete]
