"""Tracing makes hundreds of thousands of small objects, nearly all of which live on."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def uncollected() -> Iterator[None]:
    """Keeps Python from looking for garbage for a while, among those objects and all that imports have made.

    It is a tenth of the time to the end of the first step: `python -m tests.bench.overhead`.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
