"""Memory against time as a drawing: a dot for every layout that fits, and the Pareto front.

Time is on a logarithmic scale: a percent is as wide everywhere. Widths are percent of whatever room there is.
"""

from math import log
from typing import Any

import numpy as np

from jaxpar.html.markup import Markup, join, percent, swatch, tag
from jaxpar.mesh.axes import AXES
from jaxpar.plan.enumerate import at
from jaxpar.plan.pareto import Points
from jaxpar.plan.search import Plan, describe
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_bytes, show_seconds

HEIGHT, WIDTH = 340, 1000  # units of the drawing; the width is stretched
GRID = 5  # units of a cell: of the dots in one, one is drawn
# seconds, roundest first: those of a tier are tried where there are fewer than so many
_TIERS = (
    (5, (1, 2, 5)), (5, (3, 4, 6, 8)), (5, (1.5, 2.5, 7, 9)),
    (3, np.arange(1, 10, 0.5)), (3, np.arange(1, 10, 0.1).round(1)), (3, np.arange(1, 10, 0.01).round(2)),
)  # fmt: skip
_APART = 0.13  # of the width: labels of ticks


class Frame:
    """The frame of the drawing: maps a time and a size to the sheet; `room` is the limit of memory, with its label."""

    def __init__(self, points: Points, room: float):
        low, high = log(points.seconds.min()), log(points.seconds.max())
        pad = max(0.03 * (high - low), 0.015)  # at least two of the finest ticks fit
        self.low, self.high, self.room, self.top = low - pad, high + pad, room, room * 1.07

    def x(self, seconds: Any) -> Any:
        """Returns the share of the width."""
        return (np.log(seconds) - self.low) / (self.high - self.low)

    def y(self, size: Any) -> Any:
        """Returns units from the top."""
        return HEIGHT * (1 - np.asarray(size) / self.top)


def scatter(plan: Plan) -> Markup:
    """Returns the drawing with its axes and a legend that has the numbers of what is marked."""
    frame = Frame(plan.points, plan.question.room)
    sizes = memory_ticks(plan.question.room)
    side = [tag("text", show_bytes(size), x="100%", dx="-7", y=_n(frame.y(size) + 4), text_anchor="end")
            for size in sizes]  # fmt: skip
    times = [tag("text", show_tick(each), x=percent(frame.x(each)), y="14", text_anchor="middle")
             for each in time_ticks(frame)]  # fmt: skip
    plot = tag("div", _field(plan.points, frame, sizes), _marks(plan, frame), cls="jx-field")
    return join([
        _legend(plan),
        tag("div", "memory per device, modelled", cls="jx-small"),
        tag("div", tag("svg", *side, cls="jx-side", aria_hidden="true"), plot,
            tag("span"), tag("svg", *times, cls="jx-axis", aria_hidden="true"), cls="jx-plot"),
        tag("div", "time of a step, modelled, on a logarithmic scale", cls="jx-small jx-under"),
    ])  # fmt: skip


def kinds(points: Points) -> dict[str, np.ndarray]:
    """Returns which layouts are of which kind, by what there is most to say of; drawn in this order."""
    pipe, sizes = points.layouts.pipe > 1, points.layouts.sizes
    within = [axis for axis in TECHNIQUES if axis != "pipe" and AXES[axis].splits]
    inner = ~pipe & np.any([np.greater(sizes.get(axis, 1), 1) & ~pipe for axis in within], axis=0)
    alone = " and ".join(axis for axis in sizes if not AXES[axis].splits)
    return {"with a pipeline": pipe, f"with {' or '.join(within)}": inner, f"{alone} alone": ~pipe & ~inner}


def thinned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the indices of dots to draw, the first of each cell of the sheet."""
    cells = np.stack([x // GRID, y // GRID], axis=1)
    return np.sort(np.unique(cells, axis=0, return_index=True)[1])


def memory_ticks(room: float) -> list[float]:
    """Returns round sizes from 0 to what there is, at most six."""
    unit = 1024.0 ** int(log(max(room, 1)) / log(1024))
    step = next(each for each in (1, 2, 5, 10, 20, 50, 100, 200, 500) if room / unit / each < 6)
    return [float(size) * unit for size in range(0, int(room / unit) + 1, step)]


def time_ticks(frame: Frame) -> list[float]:
    """Returns round seconds within the sheet, far enough from each other for their labels, the roundest first."""
    found: list[float] = []
    powers = range(int(frame.low / log(10)) - 2, int(frame.high / log(10)) + 2)
    for fewest, tier in _TIERS:
        if len(found) >= fewest:
            continue
        for seconds in (float(mantissa) * 10.0**power for power in powers for mantissa in tier):
            place = frame.x(seconds)
            if 0.02 <= place <= 0.97 and all(abs(place - frame.x(other)) >= _APART for other in found):
                found.append(seconds)
    return sorted(found)


def show_tick(seconds: float) -> str:
    """Returns seconds as an axis has them, without a colon."""
    return f"{seconds:.5g} s" if seconds >= 1 else f"{seconds * 1000:.5g} ms"


def _field(points: Points, frame: Frame, sizes: list[float]) -> Markup:
    """Returns dots, front and grid: paths that are stretched, their strokes not."""
    x, y = WIDTH * frame.x(points.seconds), frame.y(points.bytes)
    grid = "".join(f"M0 {_n(frame.y(size))}H{WIDTH}" for size in sizes)
    grid += "".join(f"M{_n(WIDTH * frame.x(each))} 0V{HEIGHT}" for each in time_ticks(frame))
    drawn = [_path(grid, "jx-grid"), _path(f"M0 {_n(frame.y(frame.room))}H{WIDTH}", "jx-most")]
    for number, mask in enumerate(kinds(points).values()):
        which = np.flatnonzero(mask)
        which = which[thinned(x[which], y[which])]
        dots = "".join(f"M{_n(x[i])} {_n(y[i])}h0" for i in which)
        drawn.append(_path(dots, f"jx-dots jx-p{number}") if dots else Markup())
    pareto = points.pareto
    steps = f"M{_n(x[pareto[0]])} {_n(y[pareto[0]])}" + "".join(f"H{_n(x[i])}V{_n(y[i])}" for i in pareto[1:])
    drawn.append(_path(f"{steps}H{WIDTH}", "jx-front"))
    return tag("svg", *drawn, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img",
               aria_label="Memory against time of every layout that fits")  # fmt: skip


def _marks(plan: Plan, frame: Frame) -> Markup:
    """Returns what keeps its shape: the front's dots, which tell what they are; the chosen and the fastest."""
    points, drawn = plan.points, []
    for i in points.under(np.linspace(0, 1, 33) * frame.top).tolist():
        numbers = f"{show_seconds(float(points.seconds[i]))}, {show_bytes(float(points.bytes[i]))}"
        what = f"{describe(at(points.layouts, i))}: {numbers}"
        place = {"cx": percent(frame.x(points.seconds[i])), "cy": _n(frame.y(points.bytes[i]))}
        drawn.append(tag("circle", tag("title", what), **place, r="4", cls="jx-best"))
    for cls, radius, each in (("jx-fastest", "9", plan.fastest), ("jx-chosen", "7", plan.best[0])):
        place = {"cx": percent(frame.x(each.time.total)), "cy": _n(frame.y(each.memory.total))}
        drawn.append(tag("circle", tag("title", describe(each.candidate)), **place, r=radius, cls=cls))
    words = f"{show_bytes(plan.question.room)}: what a program may take"
    drawn.append(tag("text", words, x="100%", dx="-6", y=_n(frame.y(plan.question.room) - 6), text_anchor="end",
                     cls="jx-halo"))  # fmt: skip
    return tag("svg", *drawn, cls="jx-over")


def _legend(plan: Plan) -> Markup:
    counts = {name: int(mask.sum()) for name, mask in kinds(plan.points).items()}
    numbers = lambda each: f"{show_seconds(each.time.total)}, {show_bytes(each.memory.total)}"  # noqa: E731
    first, fastest = plan.best[0], plan.fastest
    same = first.candidate == fastest.candidate
    items = [swatch("jx-ring jx-chosen", f"chosen{', and the fastest' * same}: {numbers(first)}")]
    items += [] if same else [swatch("jx-ring jx-fastest", f"fastest: {numbers(fastest)}")]
    items.append(swatch("jx-stroke", "Pareto front: nothing is faster with as little memory"))
    items += [
        swatch(f"jx-p{number}", f"{count:,} {name}") for number, (name, count) in enumerate(counts.items()) if count
    ]
    return tag("ul", *[tag("li", item) for item in items], cls="jx-key")


def _path(d: str, cls: str) -> Markup:
    return tag("path", d=d, cls=cls, vector_effect="non-scaling-stroke")


def _n(number: float) -> str:
    return f"{number:.1f}".removesuffix(".0")
