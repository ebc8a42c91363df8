"""`jp.schedule`: a schedule by name, from a CSV file or from a layout, which notebooks show as a picture.

`compare` lists the schedules of the library for the same stages and microbatches, side by side.
"""

from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, file_errors, refuse
from jaxpar.files import write_page
from jaxpar.html.markup import Markup, in_ascii, style, tag
from jaxpar.pipeline.draw.draw_schedule import count_noun, describe_cut, svg
from jaxpar.pipeline.draw.svg import printable
from jaxpar.pipeline.draw.thumbnail import overview
from jaxpar.pipeline.tables import library
from jaxpar.pipeline.tables.csv import from_csv, to_csv
from jaxpar.pipeline.tables.price import OpTimes, Price, price
from jaxpar.pipeline.tables.schedule import Schedule

HEAD = ("schedule", "chunks", "ticks", "ideal", "barrier", "work", "slots", "kept", "stash", "messages")
NOTE = """\
ideal, barrier: idle share of a run in which every op starts as soon as it can, and of one that waits after every tick
work: computation, with the idle cells of phased tables, which have no conditional; 1: no idle cell is computed
slots, kept: activations on the fullest stage, counted by chunk, and in microbatches of a whole stage
stash: inputs and output gradients of matmuls, which a B saves for its W; in addition to kept"""
MAX_TOOLTIPS = 300  # cells: the bars of larger tables have no tooltips, to keep the page small


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


class NotebookSchedule(Schedule):
    """A `Schedule` with its pictures."""

    def __repr__(self) -> str:
        return f"<schedule {self.name}: {describe_cut(self)}, {count_noun(self.ticks, 'tick')}, {self.bubble:.1%} idle>"

    def _repr_html_(self) -> str:
        cost, peak = self.price(), max(self.peak)
        summary = (
            f"{count_noun(self.ticks, 'tick')}; {cost.asynchronous_bubble:.1%} idle if every op starts as soon "
            f"as it can, "
            f"{cost.barrier_bubble:.1%} with a barrier after every tick, where a backward takes two forwards; a stage "
            f"keeps the activations of at most {peak / self.chunks:.3g} of "
            f"{count_noun(self.microbatches, 'microbatch')}; "
            f"{count_noun(self.messages, 'message')} per step"
        )
        frame = tag("div", self._picture(), cls="jx-scroll jx-fit", role="region", tabindex="0", aria_label="Schedule")
        return in_ascii(tag("div", tag("style", Markup(style())), frame, tag("p", summary, cls="jx-small"),
                            cls="jaxpar jx-fragment"))  # fmt: skip

    def _picture(self) -> Markup:
        small = sum(1 for _ in self) <= MAX_TOOLTIPS
        picture = svg(self, OpTimes()) if small else overview(self, OpTimes())
        return Markup(picture.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1).strip())

    def price(self, **times: float | tuple[float, ...]) -> Price:
        """Returns the time of a step, run asynchronously and with a barrier after every tick.

        Args:
          **times: `forward`, `backward`, `weights`, `send`, in any common unit: 1, 1, 1 and 0 by default. A backward
            that is not split takes `backward + weights`.

        Raises:
          JaxparError: If a time is not a number, or has another name.
        """
        return price(self, _op_times(times))

    def svg(self, path: str | Path | None = None, **times: float | tuple[float, ...]) -> str:
        """Returns an SVG drawing to scale, and writes it to `path` if given; `times` as in `price`."""
        text = svg(self, _op_times(times))
        if path is not None:
            write_page(path, text, like="schedule.svg")
        return text

    def csv(self, path: str | Path | None = None) -> str:
        """Returns the table as CSV, which `jp.schedule(path)` reads, and writes it to `path` if given."""
        text = to_csv(self)
        if path is not None:
            write_page(path, text, like="own.csv")
        return text

    def compare(self, **times: float | tuple[float, ...]) -> str:
        """Returns a table that compares this schedule with the library's, as text; `times` as in `price`."""
        op_times = _op_times(times)
        own_row = [] if self.name in library.LIBRARY else [row(self, price(self, op_times))]
        chunks = self.chunks if self.chunks > 1 else None
        return table([*own_row, *compare(op_times, stages=self.stages, microbatches=self.microbatches, chunks=chunks)])


def schedule(
    name: str | Path | Schedule, *, stages: int = 0, microbatches: int = 0, chunks: int | None = None
) -> NotebookSchedule:
    """Returns a pipeline's schedule, which a notebook shows as a picture.

    >>> print(schedule("1f1b", stages=2, microbatches=2))
    stage 0  F0 F1  . B0  . B1
    stage 1   . F0 B0 F1 B1  .

    Args:
      name: The name of a schedule in the library, a CSV file, or a schedule such as `layout.schedule`.
      stages: Devices along `pipe`.
      microbatches: Number of parts of the batch, which pass the stages in sequence.
      chunks: Parts of the model on each stage; None is the schedule's default.

    Raises:
      JaxparError: If there is no such schedule, it does not support these numbers, or a table cannot be run.
    """
    if isinstance(name, Schedule):
        return _to_notebook(name)
    if str(name).endswith(".csv"):
        rule = "a schedule is a name of the library, or a CSV file in UTF-8"
        with file_errors(Path(name), rule=rule, fix="jaxpar schedule 1f1b --stages 4 --microbatches 8 --csv own.csv"):
            text = Path(name).read_text(encoding="utf-8-sig")
        return _to_notebook(from_csv(text))
    return _to_notebook(library.schedule(str(name), stages=stages, microbatches=microbatches, chunks=chunks))


def _to_notebook(table: Schedule) -> NotebookSchedule:
    return NotebookSchedule(**{field.name: getattr(table, field.name) for field in fields(Schedule)})


def _op_times(times: dict[str, float | tuple[float, ...]]) -> OpTimes:
    names = [field.name for field in fields(OpTimes)]
    if unknown := [key for key in times if key not in names]:
        raise refuse(f"{unknown[0]}={times[unknown[0]]!r:.40}", rule=f"times are {', '.join(names)}", fix="forward=1.0")
    return OpTimes(**times)  # pyright: ignore[reportArgumentType]
