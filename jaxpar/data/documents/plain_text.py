"""Checks that files are UTF-8 text: other formats are refused, and single invalid bytes are counted."""

import codecs
from dataclasses import dataclass
from pathlib import Path

from jaxpar.data.documents.compressed import kind_of
from jaxpar.errors import refuse

NO_TEXT = 0.1  # share of zeros and invalid UTF-8 bytes above which a file is refused: Latin-1 prose has 1-5 %
RULE, FIX = "text is in utf-8", "data.pattern, such as '*.txt'; of another encoding: iconv -f latin1 -t utf-8"


@dataclass
class WrongBytes:
    """Counts the invalid bytes in the files of a corpus.

    Attributes:
      bytes: Number of bytes that are no UTF-8.
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
        return (
            f"{self.bytes:,} bytes {place} are no utf-8: a tokenizer reads U+FFFD, bytes stay bytes" * bool(self.bytes)
            + "; " * bool(self.bytes and self.zeros)
            + f"{self.zeros:,} zeros {place} are left out of bytes" * bool(self.zeros)
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
          JaxparError: If the file is no text.
        """
        if block and not self.begin and (kind := kind_of(block[:16])):
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
