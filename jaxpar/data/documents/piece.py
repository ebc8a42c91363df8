"""A piece of a document: its place, its text, and the invalid Unicode replaced in it."""

import re
from dataclasses import dataclass
from typing import Any, NamedTuple


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
