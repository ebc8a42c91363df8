"""A piece of a document, and the place in the files where the next one begins."""

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """The place in the files up to which documents are packed.

    Attributes:
      file: Index of the file.
      at: Byte offset in the file; for Parquet the row group.
      row: Row of the file, from 0.
    """

    file: int = 0
    at: int = 0
    row: int = 0


START = Place()


@dataclass(frozen=True, slots=True)
class Piece:
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
