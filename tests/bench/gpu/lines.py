"""The record: a file of lines, each a JSON object, that outlasts whatever ends the process that writes it.

A line is written at once and is on the disk before the next measurement begins. What a kill or a full disk leaves of a
line is no line: readers pass over it, and the next writer begins on a new one.
"""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse

from ..gpu.identity import Identity

NAME = "gpu.jsonl"
MOST = 12 * 2**20  # bytes of the file: with the log beside it, below 16 MiB


@dataclass(frozen=True)
class Lines:
    """The lines of one file, seen by one identity.

    Attributes:
      path: The file; it need not be there.
      identity: Whose lines are added, and found again.
    """

    path: Path
    identity: Identity

    def own(self) -> list[dict[str, Any]]:
        """Returns the lines of this identity, the oldest first."""
        return [line for line in read(self.path) if self.identity.owns(line)]

    def find(self, stage: str, what: str) -> dict[str, Any] | None:
        """Returns the newest line of this identity about one thing; None where there is none."""
        found = [line for line in self.own() if (line.get("stage"), line.get("what")) == (stage, what)]
        return found[-1] if found else None

    def add(self, **fields: Any) -> dict[str, Any]:
        """Adds a line, and returns it as a reader will find it.

        Raises:
          JaxparError: If it cannot be written: the disk, or the file, is full.
        """
        text = json.dumps(fields | self.identity.to_dict(), default=str)
        try:
            _append(self.path, text)
        except OSError as error:
            raise refuse(
                f"{self.path}: {error.strerror or error}",
                rule=f"a measurement is kept: a folder that can be written, and at most {MOST // 2**20} MiB of lines",
                fix="free some of the disk and run it again: it goes on where it stopped",
            ) from error
        return json.loads(text)


def read(path: Path) -> list[dict[str, Any]]:
    """Returns all whole lines of a file; none where there is no file."""
    return list(_whole(path)) if path.exists() else []


def _whole(path: Path) -> Iterator[dict[str, Any]]:
    for text in path.read_bytes().splitlines():
        try:
            line = json.loads(text)
        except ValueError:  # what a kill left of a line
            continue
        if isinstance(line, dict):
            yield line


def _append(path: Path, text: str) -> None:
    """Writes a whole line, or nothing."""
    file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
    try:
        size = os.fstat(file).st_size
        torn = size > 0 and os.pread(file, 1, size - 1) != b"\n"
        data = ("\n" * torn + text + "\n").encode()
        if size + len(data) > MOST:
            raise OSError(None, "the file is full")
        try:
            if os.write(file, data) != len(data):
                raise OSError(None, "No space left on device")
            os.fsync(file)
        except OSError:
            os.ftruncate(file, size)
            raise
    finally:
        os.close(file)
