"""Pipelines: schedules as tables, and the one executor that runs any of them.

    tables/   a schedule is a table of cells (op, microbatch, chunk): the library, its closed forms, its price
    draw/     tables for terminals and as SVG
    jaxprs/   functions split by what depends on what: backward passes in two halves, lookups kept out
    run/      a table becomes a program of ticks, and a stage runs one

Nouns: a `Schedule`, a cell, a stage, a tick, a chunk, a `Program` of ticks.

To add a schedule: a generator beside those in `tables/synchronous.py`, and a row of `tables/library.LIBRARY` with its
ticks and its peak of kept activations as closed forms. Nothing else changes: tests hold both to the replay of the
table.
"""
