"""Rows of JSONL and Parquet as documents: a column of text, or of messages that a template renders.

Each row is a document, read whole. What is wrong with one is refused with its file and number, counted from 1.
"""

import io
import json
import zlib
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.bounded import LARGEST, batches, values
from jaxpar.data.documents.compressed import open_lines
from jaxpar.data.documents.messages import conversation, shown
from jaxpar.data.documents.piece import START, Piece, Place
from jaxpar.data.documents.unicode import Replaced, may_have_halves, replace_halves
from jaxpar.data.tokenizers.chat import Chat
from jaxpar.errors import refuse

TOOLS = "tools"  # the column of the tools that a conversation may call
# its values by column, bytes that it stands for, where the next begins, words for it, characters that are no Unicode
Row = tuple[Any, int, Place, str, int]


@dataclass(frozen=True)
class Rows(Corpus):
    """Rows of files.

    Attributes:
      column: The one that is read.
      chat: Renders messages; None where the column is text.
      answers: Whether only answers are learned.
      replaced: Counts characters that are no Unicode.
    """

    column: str = "text"
    chat: Chat | None = None
    answers: bool = True
    replaced: Replaced = field(default_factory=Replaced, compare=False)

    def pieces(self, place: Place = START, seam: Callable[[str, str], int | None] | None = None) -> Iterator[Piece]:
        """Yields the documents from a place on; `seam` is not asked, for no row is cut.

        Raises:
          JaxparError: If a row is broken, has no such column, holds something else, or its template raises.
        """
        for number in range(place.file, len(self.files)):
            at = place if number == place.file else Place(number)
            for row, size, then, where, unknown in _reader(self.files[number])(self.files[number], self.column, at):
                self.replaced.count(unknown, then, where)
                yield self._piece(row, size, then, where)

    def inspector(self, file: Path) -> Callable[..., None]:
        """Returns nothing to do: rows are checked one by one."""
        return lambda block: None

    def notes(self) -> list[str]:
        """Returns what is said of the rows that were read."""
        return [str(self.replaced)] if self.replaced.characters else []

    def _piece(self, row: Mapping[str, Any], size: int, then: Place, where: str) -> Piece:
        value = row[self.column]
        if self.chat is None:
            if not isinstance(value, str):
                is_chat = isinstance(value, list) and all(isinstance(each, Mapping) for each in value)
                raise refuse(
                    f"{where}: {self.column} is {shown(value)}",
                    rule="data.column names a column of text",
                    fix=f"data.messages = {self.column!r}" if is_chat else "another data.column, or without this row",
                )
            return Piece(value, size, then)
        given = conversation(value, row.get(TOOLS), column=self.column, where=where)
        if not self.answers and any(
            not on for on, each in zip(given.learned, given.messages, strict=True) if each["role"] == "assistant"
        ):
            raise refuse(
                f"{where}: an answer of weight 0",
                rule='data.learn = "all" learns every message',
                fix='data.learn = "answers", or the file without weights',
            )
        text, answers = self.chat.text(given, where)
        return Piece(text, size, then, answers=answers if self.answers else None, rendered=True)


def _reader(file: Path) -> Callable[[Path, str, Place], Iterator[Row]]:
    return read_parquet if file.suffix == ".parquet" else read_jsonl


def read_jsonl(file: Path, column: str, place: Place) -> Iterator[Row]:
    """Yields the lines of a file of JSON, which have a column; empty lines are passed over.

    Raises:
      JaxparError: If a line is no JSON object in utf-8, or has no such column.
    """
    number, at = place.row, place.at
    with _opened(file, at) as lines:
        while line := _line(file, lines):
            number, at = number + 1, at + len(line)
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            if len(line) > LARGEST:
                raise _too_large(where)
            try:
                row, unknown = json.loads(line), 0
                if may_have_halves(line):
                    row, unknown = replace_halves(row)
            except (ValueError, RecursionError) as error:
                at_end = not line.endswith(b"\n")
                raise refuse(
                    f"{where} is broken: {error}" + ", and the file ends within it" * at_end,
                    rule="each line of JSONL is an object of JSON in utf-8",
                    fix=f"sed -n {number}p {file.name}, and mend or delete it"
                    if isinstance(lines, io.BufferedReader)
                    else "mend or delete the line, and compress the file again",
                ) from error
            if not isinstance(row, dict):
                raise refuse(f"{where} is {shown(row)}", rule="each line of JSONL is an object", fix='{"text": ...}')
            if column not in row:
                raise _no_column(where, column, row)
            yield row, len(line), Place(place.file, at, number), where, unknown


def read_parquet(file: Path, column: str, place: Place) -> Iterator[Row]:
    """Yields the rows of a file of Parquet, a column and, where there are any, the tools, group of rows by group.

    Raises:
      JaxparError: If pyarrow is missing, the file is no Parquet, or has no such column.
    """
    try:
        import pyarrow
        from pyarrow import parquet
    except ModuleNotFoundError as error:
        raise refuse(
            f"{file} without the package pyarrow",
            rule="Parquet is read by pyarrow",
            fix="pip install 'jaxpar[parquet]', or JSONL",
        ) from error
    try:
        with parquet.ParquetFile(file) as table:
            if column not in table.schema_arrow.names:
                raise _no_column(str(file), column, table.schema_arrow.names)
            columns = [column, *({TOOLS} & set(table.schema_arrow.names) - {column})]
            rows, size = table.metadata.num_rows, file.stat().st_size
            each, number = size / max(rows, 1), sum(table.metadata.row_group(i).num_rows for i in range(place.at))
            for group in range(place.at, table.num_row_groups):
                for batch in batches(table, group, columns):
                    if number + len(batch) <= place.row:
                        number += len(batch)
                        continue
                    for row, large, unknown in values(batch):
                        number += 1
                        if large:
                            raise _too_large(f"{file}, row {number}")
                        if number > place.row:
                            then = Place(place.file, group, number)
                            yield (
                                row,
                                round(each * number) - round(each * (number - 1)),
                                then,
                                f"{file}, row {number}",
                                unknown,
                            )
    except (pyarrow.ArrowException, OSError) as error:
        raise refuse(
            f"{file}: {str(error).splitlines()[0]}", rule="a .parquet is Parquet", fix="write it anew"
        ) from error


def _opened(file: Path, at: int):
    try:
        lines = open_lines(file)
        lines.seek(at)
        return lines
    except (OSError, EOFError, zlib.error) as error:
        raise refuse(
            f"{file}: {getattr(error, 'strerror', None) or error}",
            rule="files of rows are readable",
            fix="check its permissions",
        ) from error


def _line(file: Path, lines: Any) -> bytes:
    try:
        return lines.readline(LARGEST + 1)
    except (OSError, EOFError, zlib.error) as error:  # of a compressed file that is cut off or altered
        raise refuse(
            f"{file} is broken: {error}", rule="a compressed file is whole", fix="fetch or compress it again"
        ) from error


def _too_large(where: str) -> Exception:
    return refuse(f"{where} has more than {LARGEST} bytes", rule="a row is held in memory", fix="cut it")


def _no_column(where: str, column: str, there: Any) -> Exception:
    return refuse(
        f"{where} has no column {column!r}",
        rule="every row has the column that data.column or data.messages names",
        fix=f"its columns: {', '.join(map(str, there))}" if there else "another file",
    )
