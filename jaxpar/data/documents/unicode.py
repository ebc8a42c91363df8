r"""Characters that are no Unicode: each becomes U+FFFD, is counted, and the first is said with its file and row.

JSON may hold half of a surrogate pair ("\ud83d", an emoji that was cut by a length), and a Parquet file bytes that are
no utf-8; no tokenizer takes either.
"""

import re
from dataclasses import dataclass
from typing import Any

from jaxpar.data.documents.piece import START, Place

HALF = re.compile("[\ud800-\udfff]")
_ESCAPE = re.compile(rb"\\u[dD][89a-fA-F]")
UNKNOWN = "\ufffd"


@dataclass
class Replaced:
    """Counts rows with such characters; a row that is read twice counts once.

    Attributes:
      characters: How many there were.
      rows: In how many rows.
      first: File and row of the first.
    """

    characters: int = 0
    rows: int = 0
    first: str = ""
    _until: Place = START

    def count(self, characters: int, then: Place, where: str) -> None:
        """Counts the characters of a row that ends before a place."""
        if characters and then > self._until:
            self.characters, self.rows, self._until = self.characters + characters, self.rows + 1, then
            self.first = self.first or where

    def __str__(self) -> str:
        """Returns what is said of them, "" of none."""
        if not self.characters:
            return ""
        return (
            f"{self.characters:,} characters that are no Unicode in {self.rows:,} rows became U+FFFD "
            f"(the first: {self.first})"
        )


def may_have_halves(line: bytes) -> bool:
    """Returns whether a line of JSON writes a surrogate, whole pairs too."""
    return _ESCAPE.search(line) is not None


def replace_halves(value: Any) -> tuple[Any, int]:
    """Returns a value of JSON with U+FFFD for each half of a surrogate pair, and how many there were."""
    if isinstance(value, str):
        return HALF.subn(UNKNOWN, value)
    if isinstance(value, dict):
        made = [(*replace_halves(key), *replace_halves(inner)) for key, inner in value.items()]
        return {key: inner for key, _, inner, _ in made}, sum(each[1] + each[3] for each in made)
    if isinstance(value, list):
        made = [replace_halves(each) for each in value]
        return [each for each, _ in made], sum(count for _, count in made)
    return value, 0


def decode(text: bytes) -> tuple[str, int]:
    """Returns bytes as text with U+FFFD for what is no utf-8, and how many of these there are."""
    try:
        return text.decode("utf-8"), 0
    except UnicodeDecodeError:
        marked = text.decode("utf-8", "surrogateescape")
        made = text.decode("utf-8", "replace")
        return made, made.count(UNKNOWN) - marked.count(UNKNOWN)
