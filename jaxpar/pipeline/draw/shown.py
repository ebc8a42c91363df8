"""A schedule that shows itself: `jp.schedule` makes one by name, from a file, or of a layout's own."""

from dataclasses import fields
from pathlib import Path

from jaxpar.errors import reading, refuse
from jaxpar.files import write_page
from jaxpar.html.frame import in_ascii, style
from jaxpar.html.markup import Markup, tag
from jaxpar.pipeline.draw.compare import compare, row, table
from jaxpar.pipeline.draw.schedule import cut, many, svg
from jaxpar.pipeline.draw.thumbnail import overview
from jaxpar.pipeline.tables import library
from jaxpar.pipeline.tables.csv import from_csv, to_csv
from jaxpar.pipeline.tables.price import Price, Times, price
from jaxpar.pipeline.tables.schedule import Schedule

TOLD = 300  # cells: in larger tables no bar tells of itself, for the size of the page


class ShownSchedule(Schedule):
    """A schedule, and its pictures; see `Schedule` for what it holds."""

    def __repr__(self) -> str:
        return f"<schedule {self.name}: {cut(self)}, {many(self.ticks, 'tick')}, {self.bubble:.1%} idle>"

    def _repr_html_(self) -> str:
        """The table as a picture, and what it costs in a sentence."""
        cost, most = self.price(), max(self.peak)
        said = (
            f"{many(self.ticks, 'tick')}; {cost.asynchronous_bubble:.1%} idle if every op starts as soon as it can, "
            f"{cost.barrier_bubble:.1%} with a barrier after every tick, where a backward takes two forwards; a stage "
            f"keeps the activations of at most {most / self.chunks:.3g} of {many(self.microbatches, 'microbatch')}; "
            f"{many(self.messages, 'message')} per step"
        )
        frame = tag("div", self._picture(), cls="jx-scroll jx-fit", role="region", tabindex="0", aria_label="Schedule")
        return in_ascii(tag("div", tag("style", Markup(style())), frame, tag("p", said, cls="jx-small"),
                            cls="jaxpar jx-fragment"))  # fmt: skip

    def _picture(self) -> Markup:
        small = self.ticks * self.stages - self.idle <= TOLD
        drawn = svg(self, Times()) if small else overview(self, Times())
        return Markup(drawn.replace(' xmlns="http://www.w3.org/2000/svg"', "", 1).strip())

    def price(self, **times: float | tuple[float, ...]) -> Price:
        """Returns what a step takes, run freely and with a barrier after every tick.

        Args:
          **times: `forward`, `backward`, `weights`, `send`, in any one unit: 1, 1, 1 and 0 by default. A backward that
            is not split takes `backward + weights`.

        Raises:
          JaxparError: If a time is no number, or has another name.
        """
        return price(self, _times(times))

    def svg(self, path: str | Path | None = None, **times: float | tuple[float, ...]) -> str:
        """Returns a drawing to scale as one SVG file, and writes it to `path`; `times` as in `price`."""
        text = svg(self, _times(times))
        if path is not None:
            write_page(path, text, like="schedule.svg")
        return text

    def csv(self, path: str | Path | None = None) -> str:
        """Returns the table as CSV, which `jp.schedule(path)` reads, and writes it to `path`."""
        text = to_csv(self)
        if path is not None:
            write_page(path, text, like="own.csv")
        return text

    def compared(self, **times: float | tuple[float, ...]) -> str:
        """Returns this schedule among those of the library for the same numbers, as a table of text; see `price`."""
        asked = _times(times)
        own = [] if self.name in library.LIBRARY else [row(self, price(self, asked))]
        chunks = self.chunks if self.chunks > 1 else None
        return table([*own, *compare(asked, stages=self.stages, microbatches=self.microbatches, chunks=chunks)])


def schedule(
    name: str | Path | Schedule, *, stages: int = 0, microbatches: int = 0, chunks: int | None = None
) -> ShownSchedule:
    """Returns a pipeline's schedule, which shows itself in a notebook.

    >>> print(schedule("1f1b", stages=2, microbatches=2))
    stage 0  F0 F1  . B0  . B1
    stage 1   . F0 B0 F1 B1  .

    Args:
      name: One of the library, a CSV file of your own, or a schedule, such as `layout.schedule`.
      stages: Devices along `pipe`.
      microbatches: Parts of the batch, one after the other.
      chunks: Parts of the model on each stage; None is the schedule's own.

    Raises:
      JaxparError: If there is no such schedule, it does not take these numbers, or a table cannot be run.
    """
    if isinstance(name, Schedule):
        return _shown(name)
    if str(name).endswith(".csv"):
        rule = "a schedule is a name of the library, or a CSV file in UTF-8"
        with reading(Path(name), rule=rule, fix="jaxpar schedule 1f1b --stages 4 --microbatches 8 --csv own.csv"):
            text = Path(name).read_text(encoding="utf-8-sig")
        return _shown(from_csv(text))
    return _shown(library.schedule(str(name), stages=stages, microbatches=microbatches, chunks=chunks))


def _shown(made: Schedule) -> ShownSchedule:
    return ShownSchedule(**{each.name: getattr(made, each.name) for each in fields(Schedule)})


def _times(given: dict[str, float | tuple[float, ...]]) -> Times:
    known = [each.name for each in fields(Times)]
    if wrong := [key for key in given if key not in known]:
        raise refuse(f"{wrong[0]}={given[wrong[0]]!r:.40}", rule=f"times are {', '.join(known)}", fix="forward=1.0")
    return Times(**given)  # pyright: ignore[reportArgumentType]
