"""Reads lines of compressed files: gzip and, with Python 3.14 or pyarrow, Zstandard.

A place in such a file is an offset in the uncompressed bytes; to resume there, all bytes before it are read again.
"""

import gzip
import importlib
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.errors import refuse

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# first bytes of formats that are no text
MAGIC = {
    GZIP: "gzip", ZSTD: "Zstandard", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip", b"PAR1": "Parquet",
    b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture", b"%PDF-": "PDF", b"\x7fELF": "a program",
    b"\x93NUMPY": "a NumPy array", b"ARROW1": "Arrow", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
    b"SQLite format 3\0": "a database",
}  # fmt: skip


def kind_of(head: bytes) -> str:
    """Format of a file with these first bytes, if it is a known one that is no text; else ""."""
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")


def open_lines(file: Path) -> BinaryIO:
    """Opens a file for reading its uncompressed lines.

    Raises:
      OSError: If it cannot be read.
      JaxparError: If no package reads Zstandard, or the file is of another known format.
    """
    with file.open("rb") as stream:
        head = stream.read(16)
    if head.startswith(GZIP):
        return gzip.open(file)  # pyright: ignore[reportReturnType]
    if head.startswith(ZSTD):
        return _zstd(file)
    if kind := kind_of(head):
        raise refuse(
            f"{file} is {kind}",
            rule="rows are read from JSONL, plain or in gzip or Zstandard, and from .parquet",
            fix="write it as JSONL in utf-8",
        )
    return file.open("rb")


def _zstd(file: Path) -> Any:
    try:
        return importlib.import_module("compression.zstd").open(file)  # Python 3.14
    except ModuleNotFoundError:
        pass
    try:
        import pyarrow
    except ModuleNotFoundError as error:
        raise refuse(
            f"{file} is in Zstandard, without the package pyarrow",
            rule="Zstandard is read by Python 3.14 or by pyarrow",
            fix=f"pip install 'jaxpar[parquet]', or zstd -d {file.name}",
        ) from error
    return _Seeking(pyarrow.CompressedInputStream(str(file), "zstd"))


class _Seeking:
    """Adds `readline` and a forward `seek` from the start to a stream that only reads forward."""

    def __init__(self, stream: Any):
        self._stream, self._held = stream, b""

    def seek(self, at: int) -> None:
        while at:
            count = len(self.read(min(at, 2**20)))
            if not count:
                return
            at -= count

    def read(self, size: int) -> bytes:
        chunk = self._held[:size] or self._stream.read(size)
        self._held = self._held[len(chunk) :] if self._held else b""
        return chunk

    def readline(self, limit: int) -> bytes:
        searched = 0
        while True:
            end = self._held.find(b"\n", searched, limit)
            if end >= 0 or len(self._held) >= limit:
                length = end + 1 if end >= 0 else limit
                break
            searched = len(self._held)
            chunk = self._stream.read(2**20)
            if not chunk:
                length = len(self._held)
                break
            self._held += chunk
        line, self._held = self._held[:length], self._held[length:]
        return line

    def __enter__(self) -> "_Seeking":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()
