"""The text of a run: files that are read block by block, never whole.

files ─► blocks of bytes ─► digest     which text it is: the fingerprint of a run
                       └──► pieces     parts of a document that a tokenizer reads alone
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.data.documents.piece import START, Piece, Place
from jaxpar.data.documents.plain_text import TextFile, WrongBytes
from jaxpar.errors import refuse

BLOCK = 2**22  # bytes that are read at once
PIECE = 2**17  # bytes that are tokenized at once
LONGEST = 2**20  # bytes of a piece whose text has no place to cut
SEAM = 2**9  # bytes on both sides of a cut that a tokenizer is shown
TRIED = 32  # places to cut that a tokenizer is asked about
FRESH = 10.0  # seconds in which a file that changes may keep its time of change
_CUT = re.compile(rb"(?<=[^\s])[ \n]")
Seam = Callable[[str, str], int | None]


@dataclass(frozen=True)
class Corpus:
    """Documents, one per file, in utf-8.

    Attributes:
      files: In their order.
      wrong: Counts bytes that are no text, while the digest is made.
    """

    files: tuple[Path, ...]
    wrong: WrongBytes = field(default_factory=WrongBytes, compare=False)

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in self.files)

    def pieces(self, place: Place = START, seam: Seam | None = None) -> Iterator[Piece]:
        """Yields the documents from a place on, in pieces.

        Args:
          place: Where the next piece begins.
          seam: Of an encoder: how many characters are left out at a cut; None if it cannot be there.

        Raises:
          JaxparError: If a file cannot be read, or a long one not be cut.
        """
        for number in range(place.file, len(self.files)):
            file = self.files[number]
            begin = place.at if number == place.file else 0
            size, last = file.stat().st_size, begin
            for text, end in cut(file, begin, seam):
                then = Place(number, end) if end < size else Place(number + 1)
                yield Piece(text, end - last, then, first=not last, last=end >= size)
                last = end
            if not size:  # an empty document ends too
                yield Piece("", 0, Place(number + 1))

    def inspector(self, file: Path) -> Callable[..., None]:
        """Returns the check of a file, which is given its blocks in their order."""
        return TextFile(file, self.wrong).check

    def notes(self) -> list[str]:
        """Returns what is said of the text that was read."""
        return [str(self.wrong)] if self.wrong.first else []

    def mark(self) -> str:
        """Returns a hash of names, sizes and times of change, or "" where a file is so new that they say nothing."""
        digest, newest = hashlib.blake2b(digest_size=32), 0.0
        for file in self.files:
            status = file.stat()
            digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "replace"))
            newest = max(newest, status.st_mtime)
        return digest.hexdigest() if newest < time.time() - FRESH else ""

    def digest(self, read: Callable[[int], None]) -> str:
        """Returns 16 hexadecimal digits that tell this text from others.

        Args:
          read: Is told how many bytes were read.

        Raises:
          JaxparError: If a file cannot be read, changes meanwhile or is no text, or there is none.
        """
        digest, whole = hashlib.sha256(), 0
        for file in self.files:
            size = file.stat().st_size
            digest.update(size.to_bytes(8, "big"))
            inspect = self.inspector(file)
            for block in blocks(file):
                digest.update(block)
                inspect(block)
                read(len(block))
                size -= len(block)
                whole += len(block)
            inspect(b"")
            if size:
                raise refuse(
                    f"{file} changed while it was read",
                    rule="the files of data.path do not change while a run reads them",
                    fix="start again",
                )
        if not whole:
            got = f"{len(self.files)} file{'s' * (len(self.files) > 1)} without a single byte"
            raise refuse(got, rule="the files of data.path hold at least one byte", fix="another data.path")
        return digest.hexdigest()[:16]


def blocks(file: Path, begin: int = 0) -> Iterator[bytes]:
    """Yields the bytes of a file, from one on.

    Raises:
      JaxparError: If it cannot be read.
    """
    try:
        with file.open("rb", buffering=0) as stream:
            stream.seek(begin)
            while block := stream.read(BLOCK):
                yield block
    except OSError as error:
        raise refuse(
            f"{file}: {error.strerror}", rule="text files are readable", fix="check its permissions"
        ) from error


def pieces(file: Path) -> Iterator[str]:
    """Yields the text of a file in pieces whose tokens, one after the other, are those of the whole."""
    return (text for text, _ in cut(file))


def cut(file: Path, begin: int = 0, seam: Seam | None = None) -> Iterator[tuple[str, int]]:
    """Yields the text of a file in pieces, and the byte where each ends.

    A piece ends before a space or a line's end that follows something else: there a byte-level bpe starts a new word
    anyway; other tokenizers are asked, by `seam`. A run of a million bytes without such a place is cut where it is.
    Where a piece ends depends on where it begins alone, so that a text is cut likewise from any of these places on.
    """
    held, at = b"", begin
    for block in blocks(file, begin):
        held, start = held + block, 0
        while found := _end(held, start, seam, file=file, ended=False):
            yield held[start : found[0]].decode("utf-8", "replace"), at + found[1]
            start = found[1]
        held, at = held[start:], at + start
    start = 0
    while found := _end(held, start, seam, file=file, ended=True):
        yield held[start : found[0]].decode("utf-8", "replace"), at + found[1]
        start = found[1]
    if held[start:]:
        yield held[start:].decode("utf-8", "replace"), at + len(held)


def _end(held: bytes, start: int, seam: Seam | None, *, file: Path, ended: bool) -> tuple[int, int] | None:
    """Returns where a piece ends and the next begins; None where the text must go on, or it is the last piece."""
    tried = 0
    for found in _CUT.finditer(held, start + PIECE):
        place = found.start()
        if place - start > LONGEST or tried == TRIED or not (ended or place + SEAM < len(held)):
            break
        if held[max(0, place - 4) : place].decode("utf-8", "replace")[-1].isspace():  # such as U+3000
            continue
        drop = 0 if seam is None else seam(*_sides(held, start, place))
        if drop is not None:
            return place, place + drop
        tried += 1
    if len(held) - start <= LONGEST + SEAM or (ended and len(held) - start <= LONGEST):
        return None
    if seam is not None:
        raise refuse(
            f"{file} has {LONGEST} bytes without a place at which its tokens may be cut",
            rule="tokens of a long document are those of its pieces, one after the other",
            fix="one document per line of JSONL: source = 'jsonl'",
        )
    end = start + LONGEST
    while held[end] & 0xC0 == 0x80 and end > start + LONGEST - 4:  # within a character
        end -= 1
    return end, end


def _sides(held: bytes, start: int, place: int) -> tuple[str, str]:
    """Returns the text before and after a place to cut, as far as a tokenizer is shown."""
    left = held[max(start, place - SEAM) : place].decode("utf-8", "ignore")
    return left, held[place : place + SEAM].decode("utf-8", "ignore")
