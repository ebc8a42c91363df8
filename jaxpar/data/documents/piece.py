"""A piece of a document, and the place in the files where the next one begins."""

from dataclasses import dataclass
from typing import NamedTuple


class Place(NamedTuple):
    """Where packing goes on: what is before it is packed.

    Attributes:
      file: Number of the file.
      at: Byte of the file; of Parquet the row group.
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
      text: What it says.
      size: Bytes of the files that it stands for.
      next: Where the next piece begins.
      first: Whether the document begins here.
      last: Whether it ends here.
      answers: Where the text is learned, as (begin, end) of characters; None means everywhere.
      rendered: Whether a template made the text, which has its special tokens then.
    """

    text: str
    size: int
    next: Place
    first: bool = True
    last: bool = True
    answers: tuple[tuple[int, int], ...] | None = None
    rendered: bool = False
