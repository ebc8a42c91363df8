"""Pieces of documents: place, text, and the invalid Unicode replaced; and plain text files, compressed or not."""

import codecs
import gzip
import importlib
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple

from jaxpar.errors import refuse

# Reads lines of compressed files: gzip and, with Python 3.14 or pyarrow, Zstandard.

GZIP, ZSTD = b"\x1f\x8b", b"\x28\xb5\x2f\xfd"
# first bytes of formats that are no text
MAGIC = {
    GZIP: "gzip", ZSTD: "Zstandard", b"BZh": "bzip2", b"\xfd7zXZ\0": "xz", b"PK\x03\x04": "zip", b"PAR1": "Parquet",
    b"\x89PNG": "a PNG picture", b"\xff\xd8\xff": "a JPEG picture", b"%PDF-": "PDF", b"\x7fELF": "a program",
    b"\x93NUMPY": "a NumPy array", b"ARROW1": "Arrow", b"\xff\xfe": "UTF-16", b"\xfe\xff": "UTF-16",
    b"\xff\xff\xff\xff": "Arrow (a stream)", b"SQLite format 3\0": "a database",
}  # fmt: skip


class Place(NamedTuple):
    """The place in the files up to which documents are packed.

    Attributes:
      file: Index of the file.
      at: Byte offset in the file; for Parquet the row group.
      row: Row of the file, from 0.
      part: Number of documents of this row that are packed already, for rows of several.
    """

    file: int = 0
    at: int = 0
    row: int = 0
    part: int = 0


START = Place()


@dataclass(frozen=True, slots=True)
class DocumentPiece:
    """A part of a document, or all of it.

    Attributes:
      text: Its text.
      size: Bytes of the files that it covers.
      next: Where the next piece begins.
      first: Whether the document begins here.
      last: Whether the document ends here.
      answers: The learned spans of the text, as (begin, end) of characters; None means all of it.
      rendered: Whether a chat template rendered the text, which then has its special tokens.
    """

    text: str
    size: int
    next: Place
    first: bool = True
    last: bool = True
    answers: tuple[tuple[int, int], ...] | None = None
    rendered: bool = False


# Replaces invalid Unicode by U+FFFD, counts it, and reports the first one with its file and row.
#
# JSON may hold half of a surrogate pair ("\ud83d", an emoji truncated by a length limit), and a Parquet file invalid
# UTF-8; no tokenizer takes either.

HALF = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
UNKNOWN = "\ufffd"


@dataclass
class ReplacedCharacters:
    """Counts replaced characters; a row that is read twice counts once.

    Attributes:
      characters: Number of replaced characters.
      rows: Number of rows with some.
      first: File and row of the first.
    """

    characters: int = 0
    rows: int = 0
    first: str = ""
    _until: Place = START

    def count(self, characters: int, end: Place, where: str) -> None:
        """Adds the replaced characters of the row that ends at the place `end`."""
        if characters and end > self._until:
            self.characters, self.rows, self._until = self.characters + characters, self.rows + 1, end
            self.first = self.first or where

    def __str__(self) -> str:
        """The message to the user; "" if there are none."""
        if not self.characters:
            return ""
        return (
            f"{self.characters:,} characters that are no Unicode in {self.rows:,} rows became U+FFFD "
            f"(the first: {self.first})"
        )


def may_have_surrogates(line: bytes) -> bool:
    """Whether a line of JSON escapes a surrogate, also in a complete pair."""
    return _ESCAPE.search(line) is not None


def replace_surrogates(value: object) -> tuple[Any, int]:
    """Replaces each half of a surrogate pair in a JSON value by U+FFFD; returns the value and their number."""
    if isinstance(value, str):
        return HALF.subn(UNKNOWN, value)
    if isinstance(value, dict):
        pairs = [(*replace_surrogates(key), *replace_surrogates(content)) for key, content in value.items()]
        return {key: content for key, _, content, _ in pairs}, sum(item[1] + item[3] for item in pairs)
    if isinstance(value, list):
        pairs = [replace_surrogates(item) for item in value]
        return [item for item, _ in pairs], sum(count for _, count in pairs)
    return value, 0


def decode(text: bytes) -> tuple[str, int]:
    """Decodes bytes with U+FFFD for invalid UTF-8; returns the text and the number of replacements."""
    try:
        return text.decode("utf-8"), 0
    except UnicodeDecodeError:
        lossless = text.decode("utf-8", "surrogateescape")
        result = text.decode("utf-8", "replace")
        return result, result.count(UNKNOWN) - lossless.count(UNKNOWN)


def binary_format(head: bytes) -> str:
    """Returns the format of a file with these first bytes if it is a known format other than text; else ""."""
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
    if kind := binary_format(head):
        raise refuse(
            f"{file} is {kind}",
            rule="rows are read from JSONL, plain or in gzip or Zstandard, and from .parquet",
            fix="datasets.load_from_disk(FOLDER).to_parquet(FILE), and data.path = FILE"
            if "Arrow" in kind
            else "write it as JSONL in utf-8",
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

    def __init__(self, stream: BinaryIO):
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


NO_TEXT = 0.1  # share of zeros and invalid UTF-8 bytes above which a file is refused: Latin-1 prose has 1-5 %
RULE, FIX = "text is in utf-8", "data.pattern, such as '*.txt'; of another encoding: iconv -f latin1 -t utf-8"


@dataclass
class WrongBytes:
    """Counts the invalid bytes in the files of a corpus.

    Attributes:
      bytes: Number of bytes that are not valid UTF-8.
      zeros: Number of zero bytes.
      files: Number of files with either.
      first: File and byte of the first.
    """

    bytes: int = 0
    zeros: int = 0
    files: int = 0
    first: str = ""

    def __str__(self) -> str:
        """The message to the user; "" if there are none."""
        if not self.first:
            return ""
        place = f"in {self.files:,} file{'s' * (self.files > 1)} (the first: {self.first})"
        effect = 'tokenizer = "bytes" keeps them, any other reads U+FFFD'
        return (
            f"{self.bytes:,} bytes {place} are no utf-8: {effect}" * bool(self.bytes)
            + "; " * bool(self.bytes and self.zeros)
            + f'{self.zeros:,} zeros {place} are dropped by tokenizer = "bytes"' * bool(self.zeros)
        )


class TextFile:
    """Checks a file block by block, in order.

    Args:
      file: The file.
      wrong: Counts its invalid bytes.
    """

    def __init__(self, file: Path, wrong: WrongBytes):
        self.file, self.wrong, self.begin, self.counted = file, wrong, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def check(self, block: bytes) -> None:
        """Counts the invalid bytes of the next block; an empty block ends the file.

        Raises:
          JaxparError: If the file is not text.
        """
        if block and not self.begin and (kind := binary_format(block[:16])):
            raise refuse(f"{self.file} is {kind}, and no text", rule=RULE, fix=FIX)
        undecoded = len(self._decoder.getstate()[0])
        text = self._decoder.decode(block, final=not block)
        zeros, bad_bytes, first = block.count(0), 0, -1
        try:
            text.encode()
        except UnicodeEncodeError as error:
            first = self.begin - undecoded + len(text[: error.start].encode())
            bad_bytes = sum("\udc80" <= character <= "\udcff" for character in text[error.start :])
        if block and not self.begin and zeros + bad_bytes > NO_TEXT * len(block):
            got = (
                f"{self.file} is no text: {zeros:,} zeros and {bad_bytes:,} bytes that are no utf-8 "
                f"in {len(block):,} bytes"
            )
            raise refuse(got, rule=RULE, fix=FIX)
        if zeros and (first < 0 or self.begin + block.index(0) < first):
            first = self.begin + block.index(0)
        if zeros or bad_bytes:
            self.wrong.bytes, self.wrong.zeros = self.wrong.bytes + bad_bytes, self.wrong.zeros + zeros
            self.wrong.files += not self.counted
            self.wrong.first, self.counted = self.wrong.first or f"{self.file}, byte {first}", True
        self.begin += len(block)
