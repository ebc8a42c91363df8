"""Pipelines: schedules as tables, and the one executor that runs any of them.

    tables/   a schedule is a table of cells (op, microbatch, chunk): the library, its closed forms, its price
    draw/     tables for terminals and as SVG
    jaxprs/   functions split by their dependencies: backward passes in two halves, the least that they keep, lookups
              with shardings around them
    run/      a table becomes a program of ticks, and a stage runs one

Nouns: a `Schedule`, a cell, a stage, a tick, a chunk, a `Program` of ticks.

To add a schedule: a generator beside those in `tables/synchronous.py`, and a row of `tables/library.LIBRARY` with its
ticks and its peak of kept activations as closed forms. No other code changes: the executor runs it, prices and draws
it, and tests compare both closed forms with the replay of the table. `README.md` has a row for each.
"""

from importlib import import_module

__all__ = ["history"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("jaxpar.pipeline.run.unflushed"), name)
