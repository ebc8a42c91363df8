"""Pauses garbage collection during tracing, which makes hundreds of thousands of small objects that nearly all stay."""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def paused_gc() -> Iterator[None]:
    """Disables Python's garbage collector until the context ends: a tenth of the time to the end of the first step.

    Source: `python -m tests.bench.overhead`. It would scan all objects of tracing and of imports.
    """
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
