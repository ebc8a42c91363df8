"""The text of a run: reads files block by block, so that memory never holds a whole file.

files ─► blocks of bytes ─► digest     identifies the text: the fingerprint of a run
                       └──► pieces     parts of a document that are tokenized independently
"""

import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.data.documents.plain_text import START, DocumentPiece, Place, TextFile, WrongBytes
from jaxpar.errors import refuse

BLOCK = 2**22  # bytes per read
PIECE = 2**17  # bytes of a piece, at least, unless the document ends
LONGEST = 2**20  # bytes of a piece, at most
SEAM = 2**9  # bytes on each side of a candidate cut that the tokenizer encodes
MOST_CUTS = 32  # candidate cuts that the tokenizer tests
FRESH = 10.0  # seconds in which a file may change and keep its modification time
_CUT = re.compile(rb"(?<=[^\s])[ \n]")
Seam = Callable[[str, str], int | None]


@dataclass(frozen=True)
class Corpus:
    """Documents, one per file, in utf-8.

    Attributes:
      files: The files, in order.
      wrong_bytes: Counts invalid bytes while the digest is computed.
    """

    files: tuple[Path, ...]
    wrong_bytes: WrongBytes = field(default_factory=WrongBytes, compare=False)

    @property
    def bytes(self) -> int:
        """Bytes of all files."""
        return sum(file.stat().st_size for file in self.files)

    def pieces(self, place: Place = START, seam: Seam | None = None) -> Iterator[DocumentPiece]:
        """Yields the pieces of all documents from a place on.

        Args:
          place: The place where the next piece begins.
          seam: `Encoder.seam`: the characters to drop at a cut, None if a cut changes the tokens.

        Raises:
          JaxparError: If a file cannot be read, or a long document cannot be cut.
        """
        for number in range(place.file, len(self.files)):
            file = self.files[number]
            begin = place.at if number == place.file else 0
            size, piece_begin = file.stat().st_size, begin
            for text, end in cut_pieces(file, begin, seam):
                next_place = Place(number, end) if end < size else Place(number + 1)
                yield DocumentPiece(text, end - piece_begin, next_place, first=not piece_begin, last=end >= size)
                piece_begin = end
            if not size:  # an empty document ends too
                yield DocumentPiece("", 0, Place(number + 1))

    def inspector(self, file: Path) -> Callable[..., None]:
        """Returns the check of a file, to be called with each of its blocks in order."""
        return TextFile(file, self.wrong_bytes).check

    def notes(self) -> list[str]:
        """Returns messages to the user about the text that was read."""
        return [str(self.wrong_bytes)] if self.wrong_bytes.first else []

    def mark(self) -> str:
        """Hash of names, sizes and modification times; "" if a file is so new that a change may not alter its time."""
        digest, newest = hashlib.blake2b(digest_size=32), 0.0
        for file in self.files:
            status = file.stat()
            digest.update(f"{file.absolute()}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "replace"))
            newest = max(newest, status.st_mtime)
        return digest.hexdigest() if newest < time.time() - FRESH else ""

    def digest(self, read: Callable[[int], None]) -> str:
        """Hash of the content of all files, 16 hexadecimal digits.

        Args:
          read: Called with the number of bytes after each block.

        Raises:
          JaxparError: If a file cannot be read, changes meanwhile or is not text, or if all files are empty.
        """
        digest, total = hashlib.sha256(), 0
        for file in self.files:
            size = file.stat().st_size
            digest.update(size.to_bytes(8, "big"))
            inspect = self.inspector(file)
            for block in blocks(file):
                digest.update(block)
                inspect(block)
                read(len(block))
                size -= len(block)
                total += len(block)
            inspect(b"")
            if size:
                raise refuse(
                    f"{file} changed while it was read",
                    rule="the files of data.path do not change while a run reads them",
                    fix="start again",
                )
        if not total:
            got = f"{len(self.files)} file{'s' * (len(self.files) > 1)} without a single byte"
            raise refuse(got, rule="the files of data.path hold at least one byte", fix="another data.path")
        return digest.hexdigest()[:16]


def blocks(file: Path, begin: int = 0) -> Iterator[bytes]:
    """Yields the bytes of a file from an offset on.

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
    """Yields the text of a file in pieces whose concatenated tokens are the tokens of the whole text."""
    return (text for text, _ in cut_pieces(file))


def cut_pieces(file: Path, begin: int = 0, seam: Seam | None = None) -> Iterator[tuple[str, int]]:
    """Yields the text of a file in pieces, each with the byte where the next begins.

    A piece ends before a space or newline that follows another character. A byte-level BPE always starts a new word
    there; for other tokenizers, `seam` tests the cut. A million bytes without such a place are cut in any case, or
    refused if there is a `seam`. The end of a piece depends only on its beginning, so a restart at a place gives the
    same pieces.
    """
    buffer, offset = b"", begin
    for block in blocks(file, begin):
        buffer, start = buffer + block, 0
        while ends := _find_end(buffer, start, seam, file=file, ended=False):
            yield buffer[start : ends[0]].decode("utf-8", "replace"), offset + ends[1]
            start = ends[1]
        buffer, offset = buffer[start:], offset + start
    start = 0
    while ends := _find_end(buffer, start, seam, file=file, ended=True):
        yield buffer[start : ends[0]].decode("utf-8", "replace"), offset + ends[1]
        start = ends[1]
    if buffer[start:]:
        yield buffer[start:].decode("utf-8", "replace"), offset + len(buffer)


def _find_end(held: bytes, start: int, seam: Seam | None, *, file: Path, ended: bool) -> tuple[int, int] | None:
    """Returns the end of a piece and the start of the next; None if more text is needed or this is the last piece."""
    tried = 0
    for match in _CUT.finditer(held, start + PIECE):
        place = match.start()
        if place - start > LONGEST or tried == MOST_CUTS or not (ended or place + SEAM < len(held)):
            break
        if held[max(0, place - 4) : place].decode("utf-8", "replace")[-1].isspace():  # such as U+3000
            continue
        dropped = 0 if seam is None else seam(*_text_around(held, start, place))
        if dropped is not None:
            return place, place + dropped
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


def _text_around(held: bytes, start: int, place: int) -> tuple[str, str]:
    """Returns the text around a possible cut, at most `SEAM` bytes on each side."""
    left = held[max(start, place - SEAM) : place].decode("utf-8", "ignore")
    return left, held[place : place + SEAM].decode("utf-8", "ignore")
