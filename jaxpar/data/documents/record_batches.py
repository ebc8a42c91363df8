"""Reads rows of a Parquet file in batches of bounded memory, and flags rows above the size limit."""

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from jaxpar.data.documents.unicode import decode

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
    """Value of an Arrow scalar, and its number of replaced characters (see `unicode`)."""
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
