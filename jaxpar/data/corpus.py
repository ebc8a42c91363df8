"""The text of a run: files that are read block by block, never whole.

files ─► blocks of bytes ─► digest     which text it is: the fingerprint of a run
                       └──► pieces     parts of a document that a tokenizer reads alone
"""

import codecs
import hashlib
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from jaxpar.errors import refuse

BLOCK = 2**22  # bytes that are read at once
PIECE = 2**17  # characters that are tokenized at once
LONGEST = 2**20  # characters of a piece whose text has no place to cut
FRESH = 10.0  # seconds in which a file that changes may keep its time of change
# a byte-level bpe never merges what is before such a place with what is after it; Python's \S is no space anywhere
_CUT = re.compile(r"(?<=\S)[ \n]")


@dataclass(frozen=True)
class Corpus:
    """Documents, one per file, in utf-8.

    Attributes:
      files: In their order.
    """

    files: tuple[Path, ...]

    @property
    def bytes(self) -> int:
        """Of all files."""
        return sum(file.stat().st_size for file in self.files)

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
          JaxparError: If a file cannot be read or changes meanwhile, or there is no text.
        """
        digest, whole = hashlib.sha256(), 0
        for file in self.files:
            size = file.stat().st_size
            digest.update(size.to_bytes(8, "big"))
            for block in blocks(file):
                digest.update(block)
                read(len(block))
                size -= len(block)
                whole += len(block)
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


def blocks(file: Path) -> Iterator[bytes]:
    """Yields the bytes of a file.

    Raises:
      JaxparError: If it cannot be read.
    """
    try:
        with file.open("rb", buffering=0) as stream:
            while block := stream.read(BLOCK):
                yield block
    except OSError as error:
        raise refuse(
            f"{file}: {error.strerror}", rule="text files are readable", fix="check its permissions"
        ) from error


def pieces(file: Path) -> Iterator[str]:
    """Yields the text of a file in pieces whose tokens, one after the other, are those of the whole.

    A piece ends before a space or a line's end that follows something else: there a byte-level bpe starts a new word
    anyway. A run of a million characters without one is cut where it is.
    """
    decoder, held = codecs.getincrementaldecoder("utf-8")("replace"), ""
    for block in blocks(file):
        held += decoder.decode(block)
        begin = 0
        while len(held) - begin > PIECE:
            cut = _CUT.search(held, begin + PIECE)
            if cut is None and len(held) - begin < LONGEST:
                break  # the next block may have a place
            end = min(cut.start() if cut else len(held), begin + LONGEST)
            yield held[begin:end]
            begin = end
        held = held[begin:]
    if held := held + decoder.decode(b"", final=True):
        yield held
