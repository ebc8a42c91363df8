"""Lines of compressed files: gzip and, where Python or pyarrow can, Zstandard.

A place in such a file is a byte of what it holds: to go on from there, what is before is read again.
"""

import gzip
import importlib
from pathlib import Path
from typing import Any, BinaryIO

from jaxpar.errors import refuse

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# files that are no text, by their first bytes
MAGIC = {
    GZIP: "gzip", ZSTD: "Zstandard", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip", b"PAR1": "Parquet",
    b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture", b"%PDF-": "PDF", b"\x7fELF": "a program",
    b"\x93NUMPY": "a NumPy array", b"ARROW1": "Arrow", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
    b"SQLite format 3\0": "a database",
}  # fmt: skip


def kind_of(head: bytes) -> str:
    """Returns what a file is whose first bytes these are, where it is no text that is known; else ""."""
    return next((kind for magic, kind in MAGIC.items() if head.startswith(magic)), "")


def open_lines(file: Path) -> BinaryIO:
    """Returns a file open for reading its lines, uncompressed.

    Raises:
      OSError: If it cannot be read.
      JaxparError: If nothing is there that reads Zstandard, or it is of another format.
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
    """Lines of a stream that only reads on."""

    def __init__(self, stream: Any):
        self._stream, self._held = stream, b""

    def seek(self, at: int) -> None:
        while at:
            got = len(self.read(min(at, 2**20)))
            if not got:
                return
            at -= got

    def read(self, size: int) -> bytes:
        some = self._held[:size] or self._stream.read(size)
        self._held = self._held[len(some) :] if self._held else b""
        return some

    def readline(self, limit: int) -> bytes:
        searched = 0
        while True:
            end = self._held.find(b"\n", searched, limit)
            if end >= 0 or len(self._held) >= limit:
                cut = end + 1 if end >= 0 else limit
                break
            searched = len(self._held)
            more = self._stream.read(2**20)
            if not more:
                cut = len(self._held)
                break
            self._held += more
        line, self._held = self._held[:cut], self._held[cut:]
        return line

    def __enter__(self) -> "_Seeking":
        return self

    def __exit__(self, *_: Any) -> None:
        self._stream.close()
