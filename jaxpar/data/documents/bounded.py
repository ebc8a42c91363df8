"""Rows of a Parquet file, so many at once that they take little memory, and none larger than a row may be."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxpar.data.documents.unicode import decode

AT_ONCE = 256  # rows, at most
LARGEST = 2**26  # bytes of a row, and of rows that are read at once


def rows_at_once(table: Any, group: int) -> int:
    """Returns how many rows of a row group are read at once, by their mean size."""
    about = table.metadata.row_group(group)
    return max(1, min(AT_ONCE, LARGEST * about.num_rows // max(1, about.total_byte_size)))


def batches(table: Any, group: int, columns: Sequence[str]) -> Iterator[Any]:
    """Yields the record batches of a row group."""
    return table.iter_batches(rows_at_once(table, group), row_groups=[group], columns=columns)


def values(batch: Any) -> Iterator[tuple[dict[str, Any], int, int]]:
    """Yields each row, its bytes if they are too many, else 0, and how many of its characters are no Unicode."""
    if batch.nbytes <= LARGEST:
        try:
            for row in batch.to_pylist():
                yield row, 0, 0
            return
        except UnicodeDecodeError:  # raised before the first row
            pass
    for number in range(len(batch)):
        one = batch.slice(number, 1)
        if one.nbytes > LARGEST:
            yield {}, one.nbytes, 0
            continue
        found = {name: _value(one.column(name)[0]) for name in batch.schema.names}
        yield {name: value for name, (value, _) in found.items()}, 0, sum(count for _, count in found.values())


def _value(scalar: Any) -> tuple[Any, int]:
    """Returns the value of an Arrow scalar, and how many of its characters are no Unicode."""
    import pyarrow

    if not scalar.is_valid:
        return None, 0
    if isinstance(scalar, pyarrow.DictionaryScalar):
        return _value(scalar.value)
    if isinstance(scalar, pyarrow.StructScalar):
        inner = {name: _value(each) for name, each in scalar.items()}
        return {name: value for name, (value, _) in inner.items()}, _count(inner.values())
    if isinstance(scalar, pyarrow.ListScalar) and not pyarrow.types.is_map(scalar.type):
        inner = [_value(each) for each in scalar.values]
        return [value for value, _ in inner], _count(inner)
    kind = scalar.type
    if pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind) or str(kind) == "string_view":
        return decode(scalar.as_buffer().to_pybytes())
    return scalar.as_py(), 0


def _count(found: Iterable[tuple[Any, int]]) -> int:
    return sum(count for _, count in found)
