"""Tokens that are written by a process that may be killed: the next one goes on at the exact token.

    tokens-hf-32000-0f3a.begun       the tokens so far
    tokens-hf-32000-0f3a.progress    b7c9...e1: BLAKE2b of the next line
                                     {"place": [0, 1048576, 0], "size": 524288, "parts": ["9d..."]}

Every so often the file is on the disk, and then the place up to which it holds the documents. A process that goes on
checks what is there, cuts off what was written after that place, and reads the documents from it on.
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

EVERY = 10.0  # seconds between two notes of the place
Chunks = Callable[[Place], Iterable[tuple[np.ndarray, Place]]]


def write_tokens(file: Path, chunks: Chunks, say: Callable[[str], None]) -> tuple[int, tuple[str, ...]]:
    """Writes a file from where an earlier process left it; returns its size and the hashes of its parts.

    Args:
      file: It is on the disk, under its name, or what there is of it lies in a file beside it.
      chunks: A place to the tokens from it on, each array with the place after it.
      say: Where it is told that a file is gone on with.

    Raises:
      JaxparError: If it cannot be written.
    """
    begun, notes = file.with_suffix(".begun"), file.with_suffix(".progress")
    place, size, parts = _found(begun, notes)
    if size:
        say(f"packing goes on after {size:,} bytes of tokens that an earlier start has packed")
    try:
        with begun.open("r+b" if size else "w+b", buffering=0) as out:
            out.truncate(size)
            out.seek(len(parts) * packed.PART)
            hashed, last = packed.Hashed(out, parts, out.read()), time.monotonic()
            for chunk, then in chunks(place):
                hashed.write(chunk)
                if time.monotonic() - last >= EVERY:
                    os.fsync(out.fileno())
                    _note(notes, then, hashed)
                    last = time.monotonic()
            os.fsync(out.fileno())
        begun.replace(file)
        notes.unlink(missing_ok=True)
        sync(file.parent)
    except OSError as error:
        raise packed.full(begun, error) from error
    return hashed.size, hashed.parts


def _note(notes: Path, place: Place, hashed: packed.Hashed) -> None:
    rest = json.dumps({"place": place, "size": hashed.size, "parts": hashed.parts})
    write_text(notes, f"{hashlib.blake2b(rest.encode()).hexdigest()}\n{rest}\n")
    sync(notes)


def _found(begun: Path, notes: Path) -> tuple[Place, int, tuple[str, ...]]:
    """Returns the place to go on from, the bytes that are good, and the hashes of their whole parts."""
    nothing = Place(), 0, ()
    try:
        first, _, rest = notes.read_bytes().partition(b"\n")
        if first != hashlib.blake2b(rest.strip()).hexdigest().encode():
            return nothing
        said = json.loads(rest)
        if begun.stat().st_size < said["size"]:
            return nothing
        os.truncate(begun, said["size"])
    except (OSError, ValueError):  # there is none, or it was cut off while it was written
        return nothing
    parts = tuple(said["parts"])
    made = packed.Packed(text="", mark="", dtype="", size=said["size"], parts=parts)
    if packed.differs(begun, made):  # what a process did not get to the disk before the machine went down
        return nothing
    whole = said["size"] // packed.PART
    return Place(*said["place"]), said["size"], parts[:whole]
