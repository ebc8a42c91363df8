"""Pipelines: schedules as tables, and one executor that runs any table.

    tables/   schedules as tables of cells (op, microbatch, chunk), by name; closed forms and prices
    draw/     draws tables in terminals and as SVG
    run/      compiles a table to a program of ticks, which every stage runs

Terms: a `Schedule`, a cell, a stage, a tick, a chunk, a `Program` of ticks.

To add a schedule: write a generator in `tables/generators.py`, and a row of
`tables/library.LIBRARY` with closed forms for its ticks and its peak of saved activations. No other code changes: tests
compare both closed forms with the replay of the table. `README.md` has a row for each schedule.
"""

from importlib import import_module

__all__ = ["history"]  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str):
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module("jaxpar.pipeline.run.asynchronous"), name)
