"""Files that should be text in utf-8: what is something else is refused, and single wrong bytes are counted."""

import codecs
from dataclasses import dataclass
from pathlib import Path

from jaxpar.data.documents.compressed import kind_of
from jaxpar.errors import refuse

NO_TEXT = 0.1  # share of zeros and of bytes that are no utf-8 from which a file is no text: Latin-1 prose has 1-5 %
RULE, FIX = "text is in utf-8", "data.pattern, such as '*.txt'; of another encoding: iconv -f latin1 -t utf-8"


@dataclass
class WrongBytes:
    """Counts what is no text in the files of a corpus.

    Attributes:
      bytes: Bytes that are no utf-8.
      zeros: Bytes of 0.
      files: How many files have some.
      first: File and byte of the first.
    """

    bytes: int = 0
    zeros: int = 0
    files: int = 0
    first: str = ""

    def __str__(self) -> str:
        """Returns what is said of them, "" of none."""
        if not self.first:
            return ""
        of = f"in {self.files:,} file{'s' * (self.files > 1)} (the first: {self.first})"
        return (
            f"{self.bytes:,} bytes {of} are no utf-8: a tokenizer reads U+FFFD, bytes stay bytes" * bool(self.bytes)
            + "; " * bool(self.bytes and self.zeros)
            + f"{self.zeros:,} zeros {of} are left out of bytes" * bool(self.zeros)
        )


class TextFile:
    """A file that is read block by block, in their order.

    Args:
      file: The file.
      wrong: Counts what is no text.
    """

    def __init__(self, file: Path, wrong: WrongBytes):
        self.file, self.wrong, self.begin, self.counted = file, wrong, 0, False
        self._decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")

    def check(self, block: bytes) -> None:
        """Counts what is no text in the next block; an empty one ends the file.

        Raises:
          JaxparError: If the file is no text.
        """
        if block and not self.begin and (kind := kind_of(block[:16])):
            raise refuse(f"{self.file} is {kind}, and no text", rule=RULE, fix=FIX)
        held = len(self._decoder.getstate()[0])
        text = self._decoder.decode(block, final=not block)
        zeros, bad, first = block.count(0), 0, -1
        try:
            text.encode()
        except UnicodeEncodeError as error:
            first = self.begin - held + len(text[: error.start].encode())
            bad = sum("\udc80" <= each <= "\udcff" for each in text[error.start :])
        if block and not self.begin and zeros + bad > NO_TEXT * len(block):
            got = f"{self.file} is no text: {zeros:,} zeros and {bad:,} bytes that are no utf-8 in {len(block):,} bytes"
            raise refuse(got, rule=RULE, fix=FIX)
        if zeros and (first < 0 or self.begin + block.index(0) < first):
            first = self.begin + block.index(0)
        if zeros or bad:
            self.wrong.bytes, self.wrong.zeros = self.wrong.bytes + bad, self.wrong.zeros + zeros
            self.wrong.files += not self.counted
            self.wrong.first, self.counted = self.wrong.first or f"{self.file}, byte {first}", True
        self.begin += len(block)
