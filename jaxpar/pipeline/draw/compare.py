"""Compares the schedules of the library for the same stages and microbatches, side by side."""

from collections.abc import Sequence
from typing import Any

from jaxpar.errors import JaxparError
from jaxpar.pipeline.draw.svg import printable
from jaxpar.pipeline.tables import library
from jaxpar.pipeline.tables.price import OpTimes, Price, price
from jaxpar.pipeline.tables.schedule import Schedule

HEAD = ("schedule", "chunks", "ticks", "ideal", "barrier", "work", "slots", "kept", "stash", "messages")
NOTE = """\
ideal, barrier: idle share of a run in which every op starts as soon as it can, and of one that waits after every tick
work: computation, with the idle cells of phased tables, which have no conditional; 1: no idle cell is computed
slots, kept: activations on the fullest stage, counted by chunk, and in microbatches of a whole stage
stash: inputs and output gradients of matmuls, which a B saves for its W; in addition to kept"""


def row(schedule: Schedule, cost: Price) -> dict[str, Any]:
    """Returns the numbers of a schedule to compare, and its parameters."""
    return {
        "name": schedule.name,
        "stages": schedule.stages,
        "microbatches": schedule.microbatches,
        "chunks": schedule.chunks,
        "ticks": schedule.ticks,
        "time": {"ideal": cost.asynchronous, "barrier": cost.barrier},
        "bubble": {"ideal": cost.asynchronous_bubble, "barrier": cost.barrier_bubble},
        "work": cost.work_ratio,
        "slots": max(schedule.peak),
        "kept": max(schedule.peak) / schedule.chunks,
        "stash": max(schedule.stash) / schedule.chunks,
        "messages": schedule.messages,
    }


def compare(times: OpTimes, *, stages: int, microbatches: int, chunks: int | None = None) -> list[dict[str, Any]]:
    """Returns a row for every schedule of the library: its price, or the reason it cannot be built.

    Args:
      times: The time of each op and each message, in any one unit.
      stages: Size of the axis `pipe`.
      microbatches: Number of parts of the batch, which go through the stages one after the other.
      chunks: Parts of the model on each stage; a schedule that does not support it uses its default, as with None.
    """
    rows = []
    for name, family in library.LIBRARY.items():
        family_chunks = chunks if chunks in family.chunks else None
        try:
            schedule = library.schedule(name, stages=stages, microbatches=microbatches, chunks=family_chunks)
        except JaxparError as error:
            rows.append({"name": name, "cannot": error.problems[0].rule})
        else:
            rows.append(row(schedule, price(schedule, times)))
    return rows


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Formats rows as text, with a legend of the columns."""
    lines = [HEAD, *(_cells(entry) for entry in rows)]
    widths = [max(len(line[column]) for line in lines if column < len(line)) for column in range(len(HEAD))]
    formatted = [
        f"{line[0]:<{widths[0]}}  "
        + (
            "  ".join(f"{cell:>{width}}" for cell, width in zip(line[1:], widths[1:], strict=True))
            if len(line) == len(HEAD)
            else f"cannot: {entry['cannot']}"
        )
        for line, entry in zip(lines, [{}, *rows], strict=True)
    ]
    return "\n".join([*formatted, NOTE])


def _cells(row: dict[str, Any]) -> tuple[str, ...]:
    name = printable(row["name"])
    if "cannot" in row:
        return (name,)
    shares = (f"{row['bubble'][run]:.1%}" for run in ("ideal", "barrier"))
    memory = (f"{row[key]:.3g}" for key in ("kept", "stash"))
    counts = (f"{row['work']:.2f}", str(row["slots"]), *memory, str(row["messages"]))
    return (name, str(row["chunks"]), str(row["ticks"]), *shares, *counts)
