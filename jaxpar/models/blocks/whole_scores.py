"""The scores of attention that are there all at once: who sizes up a job opens `noted` while it is traced."""

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_noting: ContextVar[list[int] | None] = ContextVar("noting", default=None)


@contextmanager
def noted() -> Iterator[list[int]]:
    """Notes scores that are materialised, while the context lasts.

    Yields:
      Bytes of a device in float32, of each call of attention that is traced. Complete when the context ends.
    """
    found: list[int] = []
    token = _noting.set(found)
    try:
        yield found
    finally:
        _noting.reset(token)


def note(size: int) -> None:
    """Adds the bytes of one call's scores to what is noted."""
    found = _noting.get()
    if found is not None:
        found.append(size)
