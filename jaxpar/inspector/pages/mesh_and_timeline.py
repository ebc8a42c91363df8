"""The drawings of a report, as SVG without a script: its mesh, and the timeline of the modelled step.

The timeline has a lane for computation and one per stream of collectives. Periods without events, such as all
iterations of a loop from the fourth on, get only a small part of the width.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import ceil, floor, log10, prod

from jaxpar.html.markup import Markup, join, percent, rect_with_tooltip, tag
from jaxpar.inspector.timeline import Timeline, TimelineEvent
from jaxpar.mesh.axes import coordinates
from jaxpar.mesh.collective import KINDS
from jaxpar.units import show_seconds

_CELLS = 64  # maximum number of devices drawn
_PIXEL = 1 / 600  # share of a step: narrower events are drawn together with their neighbours
_SQUEEZED = 0.25  # maximum share of the width for all periods that are not drawn
_LABELLED = 0.03  # share of the width: minimum block width for a label of a few letters
_ENDING = 0.94  # share of the width: from here on time labels are right-aligned, not centred
_LETTER = 0.02  # share of the width: one letter of a time label, on a phone
TURNS = re.compile(r"(\d+) more turns of the loop")
_PRODUCTS = ("dot_general", "conv_general_dilated")


def kind_class(kind: str) -> str:
    """The CSS class of a kind of collective."""
    return f"jx-k{KINDS.index(kind)}" if kind in KINDS[:5] else "jx-other"


def mesh(sizes: Mapping[str, int], per_node: int, *, named: bool) -> Markup:
    """Draws the devices of a mesh node by node; only the first nodes of a large mesh.

    Args:
      sizes: Sizes of the axes by name, outermost first.
      per_node: Devices per node.
      named: Whether to label nodes with their numbers.
    """
    count, shades = prod(sizes.values()), shaded_axes(sizes)
    nodes = ceil(count / per_node)
    visible = min(nodes, max(1, _CELLS // per_node))
    parts = [_node(number, range(number * per_node, min(count, (number + 1) * per_node)), sizes, shades, named=named)
             for number in range(visible)]  # fmt: skip
    if nodes > visible:
        parts.append(tag("p", f"and {nodes - visible} more node{'s' * (nodes - visible > 1)}", cls="jx-more"))
    return tag("div", *parts, cls="jx-nodes")


def labelled_axes(sizes: Mapping[str, int]) -> list[str]:
    """The axes whose coordinates are written on a device: the five largest of those with several devices."""
    large = sorted((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: -sizes[axis])[:5]
    return [axis for axis in sizes if axis in large]


def shaded_axes(sizes: Mapping[str, int]) -> list[str]:
    """Returns the two largest axes that vary among drawn devices: one shades the cell, one the cell's lower edge."""
    count = stride = prod(sizes.values())
    varying = []
    for axis, size in sizes.items():
        stride //= size
        if size > 1 and stride < min(_CELLS, count):
            varying.append(axis)
    return sorted(varying, key=lambda axis: -sizes[axis])[:2]


def _node(number: int, devices: range, sizes: Mapping[str, int], shaded: Sequence[str], *, named: bool) -> Markup:
    label_axes = labelled_axes(sizes)
    longest = sum(len(str(sizes[axis] - 1)) + 1 for axis in label_axes)
    width = max(42, 7 * longest + 10)
    columns = 8 if len(devices) > 8 and width < 60 else 4
    cells = []
    for place, device in enumerate(devices[:_CELLS]):
        position = coordinates(device, sizes)
        label = "·".join(str(position[axis]) for axis in label_axes) or str(device)
        title = f"device {device}: " + (", ".join(f"{axis} {index}" for axis, index in position.items()) or "alone")
        depths = [0.08 + 0.5 * position[axis] / (sizes[axis] - 1) for axis in shaded]
        move = f"translate({place % columns * (width + 4)} {place // columns * 38})"
        cells.append(tag("g", tag("title", title), *_cell(width, depths, label), transform=move))
    total_width, total_height = min(columns, len(devices)) * (width + 4) - 4, ceil(len(cells) / columns) * 38 - 4
    name = f"node {number}" if named else "the mesh"
    picture = tag("svg", *cells, viewBox=f"0 0 {total_width} {total_height}", width=str(total_width), role="img",
                  aria_label=f"{name}: {len(devices)} devices")  # fmt: skip
    hidden = len(devices) - len(cells)
    overflow_note = [tag("p", f"and {hidden} more devices", cls="jx-more")] if hidden else []
    return tag("div", *([tag("div", name, cls="jx-small")] if named else []), picture, *overflow_note,
               cls="jx-node" if named else None)  # fmt: skip


def _cell(width: int, depths: Sequence[float], label: str) -> list[Markup]:
    """Draws one device: its index on the first mesh axis shades the cell, its index on the second the lower edge."""
    height = 34 if len(depths) < 2 else 27
    shapes = [tag("rect", width=str(width), height=str(height), rx="4", cls="jx-device",
                  fill_opacity=f"{(depths or [0.08])[0]:.2f}")]  # fmt: skip
    for depth in depths[1:]:
        edge = f"{depth + 0.2:.2f}"
        shapes.append(tag("rect", y="29", width=str(width), height="5", rx="2", cls="jx-edge", fill_opacity=edge))
    return [*shapes, tag("text", label, x=str(width // 2), y=str(height // 2 + 4), text_anchor="middle")]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step on a drawing: seconds, shares of the width, and whether it has events."""

    start: float
    end: float
    left: float
    right: float
    drawn: bool

    def to_share(self, seconds: float) -> float:
        """Converts seconds to a share of the width."""
        return self.left + (self.right - self.left) * (seconds - self.start) / (self.end - self.start)


def periods_without_events(time: Timeline) -> list[tuple[float, float]]:
    """The periods of a step without events: further iterations of loops, and the time after the last event."""
    last_end = max([event.end for event in time.events], default=0.0)
    gaps = sorted((event.start, event.end) for event in time.events if TURNS.fullmatch(event.name))
    return gaps + ([(last_end, time.seconds)] if last_end < 0.99 * time.seconds else [])


def stretches(time: Timeline) -> list[Stretch]:
    """Lays out a step from left to right; periods without events are squeezed into a small part of the width."""
    hidden = [(start, end) for start, end in periods_without_events(time) if end > start]
    widths = [min((end - start) / time.seconds, _SQUEEZED / len(hidden)) for start, end in hidden]
    visible = time.seconds - sum(end - start for start, end in hidden)
    rate = (1 - sum(widths)) / visible if visible > 0 else 0.0
    result, position, left = [], 0.0, 0.0
    for (start, end), width in zip([*hidden, (time.seconds, time.seconds)], [*widths, 0.0], strict=True):
        right = left + (start - position) * rate
        if start > position:
            result.append(Stretch(position, start, left, right, drawn=True))
        if end > start:
            result.append(Stretch(start, end, right, right + width, drawn=False))
        position, left = end, right + width
    return result


def width_share(seconds: float, step: Sequence[Stretch]) -> float:
    """Converts a time to a share of the width."""
    current = next((stretch for stretch in step if seconds <= stretch.end), step[-1])
    return min(max(current.to_share(seconds), 0.0), 1.0)


@dataclass
class Span:
    """Events that are drawn together: their start, their end, and the seconds of each operation."""

    left: float
    right: float
    start: float
    busy: dict[str, float]
    count: int = 1

    @property
    def operation(self) -> str:
        """The operation that takes most of its time."""
        return max(self.busy, key=lambda name: self.busy[name])


def spans(events: Iterable[TimelineEvent], step: Sequence[Stretch]) -> list[Span]:
    """Groups the events of one stream: merges events narrower than a pixel with their neighbours."""
    result: list[Span] = []
    small = False
    for event in sorted(events, key=lambda event: event.start):
        left, right, seconds = width_share(event.start, step), width_share(event.end, step), event.end - event.start
        narrow = right - left < _PIXEL
        last = result[-1] if result else None
        if last and small and narrow and left - last.right < _PIXEL and last.right - last.left < 4 * _PIXEL:
            last.right = max(last.right, right)
            last.busy[event.name] = last.busy.get(event.name, 0.0) + seconds
            last.count += 1
        else:
            result.append(Span(left, right, event.start, {event.name: seconds}))
        small = narrow
    return result


def timeline(time: Timeline) -> Markup:
    """Draws one lane of computation, one per stream of collectives, and an axis."""
    step = stretches(time)
    places = [percent(width_share(seconds, step)) for seconds in ticks(step)]
    grid = [tag("line", x1=x, x2=x, y1="0", y2="100%", cls="jx-grid") for x in places]
    streams = ["compute", *sorted(time.communication, key=lambda stream: -time.communication[stream])]
    rows = [_row(time, stream, step, grid) for stream in streams]
    return tag("div", *rows, tag("div"), _axis(step), cls="jx-timeline")


def _row(time: Timeline, stream: str, step: Sequence[Stretch], grid: Sequence[Markup]) -> Markup:
    blocks = [_span(span, stream) for span in spans([e for e in time.events if e.stream == stream], step)]
    shades, words = [], f"{show_seconds(time.compute)} busy"
    if stream != "compute":
        shades = [tag("rect", x=percent(s.left), width=percent(s.right - s.left), height="100%", cls="jx-hidden")
                  for s in step if not s.drawn]  # fmt: skip
        exposed = show_seconds(time.exposed.get(stream, 0.0))
        words = f"{show_seconds(time.communication[stream])} busy, {exposed} exposed"
    name = tag("div", tag("b", stream), " ", tag("span", words, cls="jx-small"))
    label = f"{stream}: {words}"
    return join([name, tag("svg", *grid, *shades, *blocks, cls="jx-lane", role="img", aria_label=label)])


def _span(span: Span, stream: str) -> Markup:
    match = TURNS.fullmatch(span.operation) if span.count == 1 else None
    colour = "jx-turns" if match else "jx-dot" if span.operation in _PRODUCTS else "jx-op"
    if stream != "compute":
        colour = kind_class(span.operation)
    label = span.operation if span.count == 1 else f"{span.count} events, mostly {span.operation}"
    title = f"{label}, {show_seconds(sum(span.busy.values()))}, at {show_seconds(span.start)}"
    width, left = max(span.right - span.left, _PIXEL), min(span.left, 1 - _PIXEL)
    block = rect_with_tooltip(left, width, colour, title, y="3", height="20")
    if match and width > _LABELLED:
        look = None if width > 3 * _LABELLED else "jx-wide"
        words = tag("text", f"+{match[1]}×", x=percent(left + width / 2), y="17", text_anchor="middle", cls=look)
        block = join([block, words])
    return block


def ticks(step: Sequence[Stretch]) -> list[float]:
    """Returns the times to label: starts of drawn stretches, and round times, without those too close to another.

    >>> ticks([Stretch(0.0, 1.7, 0.0, 1.0, True)])
    [0.0, 0.5, 1.0, 1.5]
    """
    seconds = sum(stretch.end - stretch.start for stretch in step if stretch.drawn) or step[-1].end
    power = 10.0 ** floor(log10(seconds / 4))
    gap = next(power * factor for factor in (1, 2, 5, 10) if seconds / (power * factor) <= 5)
    times, last = [], -1.0
    for stretch in step:
        multiples = range(floor(stretch.start / gap) + 1, floor(stretch.end / gap) + 1)
        for moment in [stretch.start, *(multiple * gap for multiple in multiples)] if stretch.drawn else []:
            place, width = stretch.to_share(moment), _LETTER * max(6, len(show_seconds(moment)))
            if place - last >= (width if place <= _ENDING else 1.5 * width):
                times.append(moment)
                last = place
    return times


def _axis(step: Sequence[Stretch]) -> Markup:
    labels = []
    for t in ticks(step):
        place = width_share(t, step)
        anchor = "start" if t == 0 else "end" if place > _ENDING else "middle"
        labels.append(tag("text", show_seconds(t) if t else "0", x=percent(place), y="12", text_anchor=anchor))
    return tag("svg", *labels, cls="jx-axis", aria_hidden="true")
