"""A plot of memory against time: a dot for every layout that fits, and the Pareto front.

Time is on a logarithmic scale: a percent has the same width everywhere. Widths are percent of the page's width.
"""

from math import log
from typing import Any

import numpy as np

from jaxpar.html.markup import Markup, join, percent, swatch, tag
from jaxpar.mesh.axes import AXES
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.search import Plan, describe
from jaxpar.plan.sensitivity import Points
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_bytes, show_seconds

HEIGHT, WIDTH = 340, 1000  # units of the plot; the width is stretched
GRID = 5  # size of a cell of the plot, in which at most one dot is drawn
# mantissas of time ticks, roundest first; (n, mantissas) are added if there are fewer than n ticks so far
_TIERS = (
    (5, (1, 2, 5)), (5, (3, 4, 6, 8)), (5, (1.5, 2.5, 7, 9)),
    (3, np.arange(1, 10, 0.5)), (3, np.arange(1, 10, 0.1).round(1)), (3, np.arange(1, 10, 0.01).round(2)),
)  # fmt: skip
_APART = 0.13  # least distance of tick labels, as a share of the width


class PlotFrame:
    """The frame of the plot: maps seconds and bytes to coordinates; `room` is the limit of memory."""

    def __init__(self, points: Points, room: float):
        low, high = log(points.seconds.min()), log(points.seconds.max())
        pad = max(0.03 * (high - low), 0.015)  # at least two of the finest ticks fit
        self.low, self.high, self.room, self.top = low - pad, high + pad, room, room * 1.07

    def x(self, seconds: np.ndarray | float) -> Any:
        """Returns the horizontal position as a share of the width."""
        return (np.log(seconds) - self.low) / (self.high - self.low)

    def y(self, size: np.ndarray | float) -> Any:
        """Returns the vertical position in units from the top."""
        return HEIGHT * (1 - np.asarray(size) / self.top)


def scatter(plan: Plan) -> Markup:
    """Returns the plot with its axes, and a legend with the numbers of the marked layouts."""
    frame = PlotFrame(plan.points, plan.question.memory_limit)
    sizes = memory_ticks(plan.question.memory_limit)
    side = [tag("text", show_bytes(size), x="100%", dx="-7", y=_n(frame.y(size) + 4), text_anchor="end")
            for size in sizes]  # fmt: skip
    times = [tag("text", show_tick(tick), x=percent(frame.x(tick)), y="14", text_anchor="middle")
             for tick in time_ticks(frame)]  # fmt: skip
    plot = tag("div", _field(plan.points, frame, sizes), _marks(plan, frame), cls="jx-field")
    return join([
        _legend(plan),
        tag("div", "memory per device, modelled", cls="jx-small"),
        tag("div", tag("svg", *side, cls="jx-side", aria_hidden="true"), plot,
            tag("span"), tag("svg", *times, cls="jx-axis", aria_hidden="true"), cls="jx-plot"),
        tag("div", "time of a step, modelled, on a logarithmic scale", cls="jx-small jx-under"),
    ])  # fmt: skip


def kinds(points: Points) -> dict[str, np.ndarray]:
    """Returns kind to a mask of its layouts (pipeline, other model axes, neither), in drawing order."""
    pipe, sizes = points.layouts.pipe > 1, points.layouts.sizes
    inner_axes = [axis for axis in TECHNIQUES if axis != "pipe" and AXES[axis].splits]
    inner = ~pipe & np.any([np.greater(sizes.get(axis, 1), 1) & ~pipe for axis in inner_axes], axis=0)
    batch_only = " and ".join(axis for axis in sizes if not AXES[axis].splits)
    return {"with a pipeline": pipe, f"with {' or '.join(inner_axes)}": inner, f"{batch_only} alone": ~pipe & ~inner}


def thinned(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """Returns the indices of dots to draw: the first of each cell of the grid."""
    cells = np.stack([x // GRID, y // GRID], axis=1)
    return np.sort(np.unique(cells, axis=0, return_index=True)[1])


def memory_ticks(room: float) -> list[float]:
    """Returns at most six round sizes from 0 to `room`."""
    unit = 1024.0 ** int(log(max(room, 1)) / log(1024))
    step = next(number for number in (1, 2, 5, 10, 20, 50, 100, 200, 500) if room / unit / number < 6)
    return [float(size) * unit for size in range(0, int(room / unit) + 1, step)]


def time_ticks(frame: PlotFrame) -> list[float]:
    """Returns round seconds within the frame, far enough apart for their labels; rounder ones take precedence."""
    ticks: list[float] = []
    powers = range(int(frame.low / log(10)) - 2, int(frame.high / log(10)) + 2)
    for fewest, tier in _TIERS:
        if len(ticks) >= fewest:
            continue
        for seconds in (float(mantissa) * 10.0**power for power in powers for mantissa in tier):
            position = frame.x(seconds)
            if 0.02 <= position <= 0.97 and all(abs(position - frame.x(tick)) >= _APART for tick in ticks):
                ticks.append(seconds)
    return sorted(ticks)


def show_tick(seconds: float) -> str:
    """Formats seconds for an axis."""
    return f"{seconds:.5g} s" if seconds >= 1 else f"{seconds * 1000:.5g} ms"


def _field(points: Points, frame: PlotFrame, sizes: list[float]) -> Markup:
    """Returns dots, front and grid as paths that stretch with the width, with constant strokes."""
    x, y = WIDTH * frame.x(points.seconds), frame.y(points.bytes)
    grid = "".join(f"M0 {_n(frame.y(size))}H{WIDTH}" for size in sizes)
    grid += "".join(f"M{_n(WIDTH * frame.x(tick))} 0V{HEIGHT}" for tick in time_ticks(frame))
    elements = [_path(grid, "jx-grid"), _path(f"M0 {_n(frame.y(frame.room))}H{WIDTH}", "jx-most")]
    for number, mask in enumerate(kinds(points).values()):
        indices = np.flatnonzero(mask)
        indices = indices[thinned(x[indices], y[indices])]
        dots = "".join(f"M{_n(x[i])} {_n(y[i])}h0" for i in indices)
        elements.append(_path(dots, f"jx-dots jx-p{number}") if dots else Markup())
    pareto = points.pareto
    steps = f"M{_n(x[pareto[0]])} {_n(y[pareto[0]])}" + "".join(f"H{_n(x[i])}V{_n(y[i])}" for i in pareto[1:])
    elements.append(_path(f"{steps}H{WIDTH}", "jx-front"))
    return tag("svg", *elements, viewBox=f"0 0 {WIDTH} {HEIGHT}", preserveAspectRatio="none", role="img",
               aria_label="Memory against time of every layout that fits")  # fmt: skip


def _marks(plan: Plan, frame: PlotFrame) -> Markup:
    """Returns marks that do not stretch: dots of the front with titles, the chosen and the fastest layout."""
    points, elements = plan.points, []
    for i in points.fastest_below(np.linspace(0, 1, 33) * frame.top).tolist():
        numbers = f"{show_seconds(float(points.seconds[i]))}, {show_bytes(float(points.bytes[i]))}"
        title = f"{describe(select_one(points.layouts, i))}: {numbers}"
        position = {"cx": percent(frame.x(points.seconds[i])), "cy": _n(frame.y(points.bytes[i]))}
        elements.append(tag("circle", tag("title", title), **position, r="4", cls="jx-best"))
    for cls, radius, ranked in (("jx-fastest", "9", plan.fastest), ("jx-chosen", "7", plan.best[0])):
        position = {"cx": percent(frame.x(ranked.time.total)), "cy": _n(frame.y(ranked.memory.total))}
        elements.append(tag("circle", tag("title", describe(ranked.candidate)), **position, r=radius, cls=cls))
    label = f"{show_bytes(plan.question.memory_limit)}: what a program may take"
    elements.append(
        tag(
            "text",
            label,
            x="100%",
            dx="-6",
            y=_n(frame.y(plan.question.memory_limit) - 6),
            text_anchor="end",
            cls="jx-halo",
        )
    )
    return tag("svg", *elements, cls="jx-over")


def _legend(plan: Plan) -> Markup:
    counts = {name: int(mask.sum()) for name, mask in kinds(plan.points).items()}
    numbers = lambda ranked: f"{show_seconds(ranked.time.total)}, {show_bytes(ranked.memory.total)}"  # noqa: E731
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
