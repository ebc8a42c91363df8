"""Temporary changes of registries (axes, techniques, exchanges) in a test or a script."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def replace_rows(table: dict[str, Any], rows: Mapping[str, Any]) -> Iterator[None]:
    """Replaces the rows of a table until the context ends."""
    old_rows = dict(table)
    table.clear()
    table.update(rows)
    try:
        yield
    finally:
        table.clear()
        table.update(old_rows)


def insert_row(table: Mapping[str, object], name: str, row: object, *, at: int) -> dict[str, Any]:
    """Returns the rows of a table with a new one at position `at`.

    >>> insert_row({"a": 1, "b": 2}, "c", 3, at=1)
    {'a': 1, 'c': 3, 'b': 2}
    """
    rows = list(table.items())
    return dict([*rows[:at], (name, row), *rows[at:]])
