"""Reads rows of JSONL and Parquet as documents: a column of text, or of messages that a chat template renders.

Each row is a document, read whole. An invalid row is refused with its file and its number, counted from 1.
"""

import codecs
import io
import json
import re
import shlex
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from jaxpar.data.corpus import Corpus
from jaxpar.data.documents.plain_text import (
    START,
    DocumentPiece,
    Place,
    ReplacedCharacters,
    decode,
    may_have_surrogates,
    open_lines,
    replace_surrogates,
)
from jaxpar.data.tokenizers.chat_template import ChatTemplate, conversation, preview
from jaxpar.errors import refuse

TABLES = {".csv": "", ".tsv": r", sep='\t'"}  # suffix to further arguments of `pandas.read_csv`

# Reads rows of a Parquet file in batches of bounded memory, and flags rows above the size limit.

AT_ONCE = 256  # rows per record batch, at most
LARGEST = 2**26  # bytes of a row, and of a record batch by the mean row size


def rows_at_once(table: Any, group: int) -> int:
    """Rows per record batch of a row group, from their mean size."""
    statistics = table.metadata.row_group(group)
    return max(1, min(AT_ONCE, LARGEST * statistics.num_rows // max(1, statistics.total_byte_size)))


def batches(table: Any, group: int, columns: Sequence[str]) -> Iterator[Any]:
    """Yields the record batches of a row group."""
    return table.iter_batches(rows_at_once(table, group), row_groups=[group], columns=columns)


def row_values(batch: Any) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yields each row, its bytes if they exceed `LARGEST` (else 0), and its number of replaced characters."""
    if batch.nbytes <= LARGEST:
        try:
            for row in batch.to_pylist():
                yield row, 0, 0
            return
        except UnicodeDecodeError:  # raised before the first row
            pass
    for number in range(len(batch)):
        row_batch = batch.slice(number, 1)
        if row_batch.nbytes > LARGEST:
            yield {}, row_batch.nbytes, 0
            continue
        cells = {name: _value(row_batch.column(name)[0]) for name in batch.schema.names}
        yield {name: value for name, (value, _) in cells.items()}, 0, sum(count for _, count in cells.values())


def _value(scalar: Any) -> tuple[Any, int]:
    """Returns the value of an Arrow scalar, and its number of replaced characters (see `piece.ReplacedCharacters`)."""
    import pyarrow

    if not scalar.is_valid:
        return None, 0
    if isinstance(scalar, pyarrow.DictionaryScalar):
        return _value(scalar.value)
    if isinstance(scalar, pyarrow.StructScalar):
        items = {name: _value(item) for name, item in scalar.items()}
        return {name: value for name, (value, _) in items.items()}, _count(items.values())
    if isinstance(scalar, pyarrow.ListScalar) and not pyarrow.types.is_map(scalar.type):
        items = [_value(item) for item in scalar.values]
        return [value for value, _ in items], _count(items)
    kind = scalar.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or str(kind) == "string_view":
        return decode(scalar.as_buffer().to_pybytes())
    return scalar.as_py(), 0


def _count(found: Iterable[tuple[Any, int]]) -> int:
    return sum(count for _, count in found)


TOOLS = "tools"  # the column of the tools that a conversation may call
# values by column, bytes in the file, place of the next row, description for errors, number of replaced characters
Row = tuple[Any, int, Place, str, int]


@dataclass(frozen=True)
class RowCorpus(Corpus):
    """Documents that are rows of files.

    Attributes:
      column: The column of text or messages.
      chat: Renders messages; None if the column is text.
      answers: Whether only answers are learned.
      replaced: Counts replaced characters.
    """

    column: str = "text"
    chat: ChatTemplate | None = None
    answers: bool = True
    replaced: ReplacedCharacters = field(default_factory=ReplacedCharacters, compare=False)

    def pieces(
        self, place: Place = START, seam: Callable[[str, str], int | None] | None = None
    ) -> Iterator[DocumentPiece]:
        """Yields the documents from a place on; `seam` is unused, since no row is cut.

        Raises:
          JaxparError: If a row is broken, has no such column, holds something else, or its template raises.
        """
        for number in range(place.file, len(self.files)):
            begin = place if number == place.file else Place(number)
            for row, size, end, where, unknown in read_rows(self.files[number], self.column, begin):
                self.replaced.count(unknown, end, where)
                yield self._piece(row, size, end, where)

    def inspector(self, file: Path) -> Callable[..., None]:
        """Returns a check that does nothing, because rows are checked when they are read."""
        return lambda block: None

    def notes(self) -> list[str]:
        """Messages to the user about the rows that were read."""
        return [str(self.replaced)] if self.replaced.characters else []

    def _piece(self, row: Mapping[str, object], size: int, then: Place, where: str) -> DocumentPiece:
        value = row[self.column]
        if self.chat is None:
            if not isinstance(value, str):
                is_chat = isinstance(value, list) and all(isinstance(item, Mapping) for item in value)
                raise refuse(
                    f"{where}: {self.column} is {preview(value)}",
                    rule="data.column names a column of text",
                    fix=f"data.messages = {self.column!r}" if is_chat else "another data.column, or without this row",
                )
            return DocumentPiece(value, size, then)
        dialog = conversation(value, row.get(TOOLS), column=self.column, where=where)
        if not self.answers and any(
            not on for on, item in zip(dialog.learned, dialog.messages, strict=True) if item["role"] == "assistant"
        ):
            raise refuse(
                f"{where}: an answer of weight 0",
                rule='data.learn = "all" learns every message',
                fix='data.learn = "answers", or the file without weights',
            )
        text, answers = self.chat.render_conversation(dialog, where)
        return DocumentPiece(text, size, then, answers=answers if self.answers else None, rendered=True)


def read_rows(file: Path, column: str, place: Place, *, others: Sequence[str] = (TOOLS,)) -> Iterator[Row]:
    """Yields the rows of a file from a place on, with the column, and with others if there are any.

    Raises:
      JaxparError: If the file or a row is broken, or has no such column.
    """
    if file.suffix == ".parquet":
        return read_parquet(file, column, place, others=others)
    return read_jsonl(file, column, place)


def read_jsonl(file: Path, column: str, place: Place) -> Iterator[Row]:
    """Yields the rows of a JSONL file from a place on; empty lines are skipped.

    Raises:
      JaxparError: If a line is no JSON object in UTF-8, is too large, or has no such column.
    """
    number, offset = place.row, place.at
    with _open_and_seek(file, offset) as lines:
        while line := _line(file, lines):
            number, offset = number + 1, offset + len(line)
            where = f"{file}, line {number}"
            if not line.strip():
                continue
            if len(line) > LARGEST:
                raise _too_large(where)
            try:
                row, unknown = json.loads(line), 0
                if may_have_surrogates(line):
                    row, unknown = replace_surrogates(row)
            except (ValueError, RecursionError) as error:
                is_truncated = not line.endswith(b"\n")
                raise refuse(
                    f"{where} is broken: {error}" + ", and the file ends within it" * is_truncated,
                    rule="each line of JSONL is an object of JSON in utf-8",
                    fix=_rewrite(file, line, lines) or f"sed -n {number}p {file.name}, and mend or delete it"
                    if isinstance(lines, io.BufferedReader)
                    else "mend or delete the line, and compress the file again",
                ) from error
            if not isinstance(row, dict):
                raise refuse(
                    f"{where} is {preview(row)}",
                    rule="each line of JSONL is an object",
                    fix=_rewrite(file, line, lines) or '{"text": ...}',
                )
            if column not in row:
                raise _no_column(where, column, row)
            yield row, len(line), Place(place.file, offset, number), where, unknown


def _rewrite(file: Path, line: bytes, rest: object) -> str:
    """Returns the command that makes JSONL of one JSON value over many lines, or of a table; "" if it is neither.

    Args:
      file: The file.
      line: Its line that is no row.
      rest: The lines after it.
    """
    start = line.strip().removeprefix(codecs.BOM_UTF8)
    if start == b"[":
        start += _line(file, rest).strip()
    new = f"{file.stem}-rows.jsonl"  # never the file itself, which the shell would empty first
    if start == b"{" or re.match(rb"\[\s*\{", start):  # elements that are no objects make no rows
        return f"jq -c {shlex.quote('.[]' if start[:1] == b'[' else '.')} {shlex.quote(file.name)} > {shlex.quote(new)}"
    if file.suffix in TABLES:
        read = f"pandas.read_csv({file.name!r}{TABLES[file.suffix]})"
        return f"in Python {read}.to_json({new!r}, orient='records', lines=True)"
    return ""


def read_parquet(file: Path, column: str, place: Place, *, others: Sequence[str] = (TOOLS,)) -> Iterator[Row]:
    """Yields the rows of a Parquet file from a place on, with the column and those of the others that exist.

    Raises:
      JaxparError: If pyarrow is missing, the file is no Parquet or has no such column, or a row is too large.
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
            columns = [column, *({*others} & set(table.schema_arrow.names) - {column})]
            rows, size = table.metadata.num_rows, file.stat().st_size
            row_bytes, number = size / max(rows, 1), sum(table.metadata.row_group(i).num_rows for i in range(place.at))
            for group in range(place.at, table.num_row_groups):
                for batch in batches(table, group, columns):
                    if number + len(batch) <= place.row:
                        number += len(batch)
                        continue
                    for row, oversize, unknown in row_values(batch):
                        number += 1
                        if oversize:
                            raise _too_large(f"{file}, row {number}")
                        if number > place.row:
                            end = Place(place.file, group, number)
                            yield (
                                row,
                                round(row_bytes * number) - round(row_bytes * (number - 1)),
                                end,
                                f"{file}, row {number}",
                                unknown,
                            )
    except (pyarrow.ArrowException, OSError) as error:
        raise refuse(
            f"{file}: {str(error).splitlines()[0]}", rule="a .parquet is Parquet", fix="write it anew"
        ) from error


def _open_and_seek(file: Path, at: int):
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
    except (OSError, EOFError, zlib.error) as error:  # a compressed file is truncated or altered
        raise refuse(
            f"{file} is broken: {error}", rule="a compressed file is whole", fix="fetch or compress it again"
        ) from error


def _too_large(where: str) -> Exception:
    return refuse(f"{where} has more than {LARGEST} bytes", rule="a row is held in memory", fix="cut it")


def _no_column(where: str, column: str, there: Iterable[str]) -> Exception:
    return refuse(
        f"{where} has no column {column!r}",
        rule="every row has the column that data.column or data.messages names",
        fix=f"its columns: {', '.join(map(str, there))}" if there else "another file",
    )
