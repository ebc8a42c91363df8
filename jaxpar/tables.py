"""Tables that a test or a script may add to: axes, techniques, exchanges."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


@contextmanager
def changed(table: dict[str, Any], rows: Mapping[str, Any]) -> Iterator[None]:
    """Makes a table hold other rows, in their order, until the context ends."""
    before = dict(table)
    table.clear()
    table.update(rows)
    try:
        yield
    finally:
        table.clear()
        table.update(before)


def inserted(table: Mapping[str, Any], name: str, row: Any, *, at: int) -> dict[str, Any]:
    """Returns the rows of a table with one more, which has so many before it.

    >>> inserted({"a": 1, "b": 2}, "c", 3, at=1)
    {'a': 1, 'c': 3, 'b': 2}
    """
    rows = list(table.items())
    return dict([*rows[:at], (name, row), *rows[at:]])
