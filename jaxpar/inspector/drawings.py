"""Drawings of a report, as SVG without a script: bars, the mesh, the timeline.

Widths are percent of whatever room there is, so text keeps its size on a phone. Everything is
built by `tag`, which escapes all that is not `Markup` already.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from math import ceil, floor, log10, prod

from jaxpar.inspector.timeline import Event, Timeline
from jaxpar.mesh.collective import KINDS
from jaxpar.units import show_bytes, show_seconds

_EMPTY = ("br", "line", "meta", "rect")
_CELLS = 64  # devices of a mesh that are drawn, if there are more
_MAGNIFIED = 0.15  # of the capacity: memory below is drawn once more
_PIXEL = 1 / 600  # of a step: what is narrower is drawn together with its neighbours
_SQUEEZED = 0.25  # of the width, at most, for all that is not drawn
_LABELLED = 0.03  # of the width: a block that has room for a few letters
_ENDING = 0.94  # of the width: labels of time end where they belong, rather than being centred
_LETTER = 0.02  # of the width: of a label of time, on a phone
TURNS = re.compile(r"(\d+) more turns of the loop")
_PRODUCTS = ("dot_general", "conv_general_dilated")


class Markup(str):
    """HTML in which everything is escaped."""

    __slots__ = ()


def tag(element: str, /, *inside: str, **attributes: str | None) -> Markup:
    """Returns an element.

    Args:
      element: Its name.
      *inside: Text, which is escaped, and markup, which is not.
      **attributes: `cls` is `class`, `_` is `-`; what is None is left out.

    >>> tag("b", "<", cls="warn")
    '<b class="warn">&lt;</b>'
    """
    words = [element]
    for name, value in attributes.items():
        if value is not None:
            name = "class" if name == "cls" else name.replace("_", "-")
            words.append(f'{name}="{escape(value)}"')
    if element in _EMPTY:
        return Markup(f"<{' '.join(words)}/>")
    return Markup(f"<{' '.join(words)}>{join(inside)}</{element}>")


def join(parts: Iterable[str]) -> Markup:
    """Returns text and markup one after the other, the text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def kind_class(kind: str) -> str:
    """Returns the class that colours a kind of collective."""
    return f"jx-k{KINDS.index(kind)}" if kind in KINDS[:5] else "jx-other"


def percent(share: float) -> str:
    """Returns a share as a length in SVG."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def bar(parts: Sequence[tuple[str, str, float]], scale: float, *, cls: str = "jx-bar") -> Markup:
    """Returns a stacked bar.

    Args:
      parts: (class, what it is, how much) from the left.
      scale: How much is the whole width.
      cls: Of the drawing.
    """
    scale, at, drawn = scale if scale > 0 else 1.0, 0.0, []
    for colour, what, size in parts:
        if size > 0:
            drawn.append(
                tag("rect", x=percent(at / scale), width=percent(size / scale), height="100%", cls=colour)
                if not what
                else _titled(at / scale, size / scale, colour, what)
            )
            at += size
    return tag("svg", *drawn, cls=cls, aria_hidden="true")


def _titled(at: float, width: float, colour: str, what: str, *, y: str = "0", height: str = "100%") -> Markup:
    place = f'x="{percent(at)}" y="{y}" width="{percent(width)}" height="{height}" class="{colour}"'
    return Markup(f"<rect {place}><title>{escape(what)}</title></rect>")


def memory_bar(parts: Sequence[tuple[str, str, float]], total: float, capacity: float | None) -> Markup:
    """Returns memory by cause against a capacity, and magnified where it is a small part of that.

    Args:
      parts: (class, what it is, bytes).
      total: Bytes needed.
      capacity: Bytes there are; None where that is not known.
    """
    scale = max(total, capacity or 0, 1)
    stacked = bar(parts, scale, cls="jx-stack")
    if not capacity:
        return tag("div", stacked, cls="jx-memory")
    at = capacity / scale
    drawn = [_caption(at, f"{show_bytes(capacity)} for a program"), tag("div", stacked, _limit(at), cls="jx-limited")]
    if total < _MAGNIFIED * capacity:
        x = percent(total / scale)
        lines = [tag("line", x1="0", x2="0", y1="0", y2="100%"), tag("line", x1=x, x2="100%", y1="0", y2="100%")]
        drawn += [tag("svg", *lines, cls="jx-zoom", aria_hidden="true"), bar(parts, total, cls="jx-stack"),
                  _caption(1.0, f"{show_bytes(total)}, magnified")]  # fmt: skip
    return tag("div", *drawn, cls="jx-memory")


def _limit(at: float) -> Markup:
    """Returns the mark of a capacity over a bar."""
    marks = [tag("line", x1=percent(at), x2=percent(at), y1="0", y2="100%", cls="jx-limit")]
    if at < 1:
        marks.insert(0, tag("rect", x=percent(at), width=percent(1 - at), y="0", height="100%", cls="jx-beyond"))
    return tag("svg", *marks, cls="jx-stack jx-marks", aria_hidden="true")


def _caption(at: float, words: str) -> Markup:
    label = tag("text", words, x=percent(at), y="12", text_anchor="end" if at > 0.5 else "start")
    return tag("svg", label, cls="jx-axis", aria_hidden="true")


def coordinates(device: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns where a device is in a mesh, by its number in it.

    >>> coordinates(5, {"data": 2, "tensor": 4})
    {'data': 1, 'tensor': 1}
    """
    found = {}
    for axis, size in reversed(list(sizes.items())):
        device, found[axis] = divmod(device, size)
    return {axis: found[axis] for axis in sizes}


def nodes_of_axes(sizes: Mapping[str, int], per_node: int) -> dict[str, int]:
    """Returns over how many nodes one group of each axis goes, at most.

    >>> nodes_of_axes({"data": 2, "fsdp": 4, "tensor": 4}, per_node=8)
    {'data': 2, 'fsdp': 2, 'tensor': 1}
    """
    count = stride = prod(sizes.values())
    found = {}
    for axis, size in sizes.items():
        stride //= size
        firsts = (device for device in range(count) if device // stride % size == 0)
        found[axis] = max(len({(first + turn * stride) // per_node for turn in range(size)}) for first in firsts)
    return found


def mesh(sizes: Mapping[str, int], per_node: int, *, named: bool) -> Markup:
    """Returns the devices of a mesh, node by node, the first of them where there are many.

    Args:
      sizes: Axis to size, outermost first.
      per_node: Devices of a node.
      named: Whether nodes have a number.
    """
    count, shaded = prod(sizes.values()), shaded_axes(sizes)
    nodes = ceil(count / per_node)
    shown = min(nodes, max(1, _CELLS // per_node))
    drawn = [_node(number, range(number * per_node, min(count, (number + 1) * per_node)), sizes, shaded, named=named)
             for number in range(shown)]  # fmt: skip
    if nodes > shown:
        drawn.append(tag("p", f"and {nodes - shown} more node{'s' * (nodes - shown > 1)}", cls="jx-more"))
    return tag("div", *drawn, cls="jx-nodes")


def labelled_axes(sizes: Mapping[str, int]) -> list[str]:
    """Returns the axes whose coordinates are written on a device: those with several devices, the five largest."""
    large = sorted((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: -sizes[axis])[:5]
    return [axis for axis in sizes if axis in large]


def shaded_axes(sizes: Mapping[str, int]) -> list[str]:
    """Returns which axes colour a device, the one of the whole cell first: the largest that vary where it is drawn."""
    count = stride = prod(sizes.values())
    varying = []
    for axis, size in sizes.items():
        stride //= size
        if size > 1 and stride < min(_CELLS, count):
            varying.append(axis)
    return sorted(varying, key=lambda axis: -sizes[axis])[:2]


def _node(number: int, devices: range, sizes: Mapping[str, int], shaded: Sequence[str], *, named: bool) -> Markup:
    labelled = labelled_axes(sizes)
    longest = sum(len(str(sizes[axis] - 1)) + 1 for axis in labelled)
    width = max(42, 7 * longest + 10)
    columns = 8 if len(devices) > 8 and width < 60 else 4
    drawn = []
    for place, device in enumerate(devices[:_CELLS]):
        where = coordinates(device, sizes)
        label = "·".join(str(where[axis]) for axis in labelled) or str(device)
        title = f"device {device}: " + (", ".join(f"{axis} {at}" for axis, at in where.items()) or "alone")
        depths = [0.08 + 0.5 * where[axis] / (sizes[axis] - 1) for axis in shaded]
        move = f"translate({place % columns * (width + 4)} {place // columns * 38})"
        drawn.append(tag("g", tag("title", title), *_cell(width, depths, label), transform=move))
    wide, high = min(columns, len(devices)) * (width + 4) - 4, ceil(len(drawn) / columns) * 38 - 4
    name = f"node {number}" if named else "the mesh"
    picture = tag("svg", *drawn, viewBox=f"0 0 {wide} {high}", width=str(wide), role="img",
                  aria_label=f"{name}: {len(devices)} devices")  # fmt: skip
    left = len(devices) - len(drawn)
    more = [tag("p", f"and {left} more devices", cls="jx-more")] if left else []
    return tag("div", *([tag("div", name, cls="jx-small")] if named else []), picture, *more,
               cls="jx-node" if named else None)  # fmt: skip


def _cell(width: int, depths: Sequence[float], label: str) -> list[Markup]:
    """Returns one device: its first axis shades it, its second one the lower edge."""
    high = 34 if len(depths) < 2 else 27
    drawn = [tag("rect", width=str(width), height=str(high), rx="4", cls="jx-device",
                 fill_opacity=f"{(depths or [0.08])[0]:.2f}")]  # fmt: skip
    for depth in depths[1:]:
        edge = f"{depth + 0.2:.2f}"
        drawn.append(tag("rect", y="29", width=str(width), height="5", rx="2", cls="jx-edge", fill_opacity=edge))
    return [*drawn, tag("text", label, x=str(width // 2), y=str(high // 2 + 4), text_anchor="middle")]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of a step on a drawing: seconds, shares of the width, and whether events tell of it."""

    start: float
    end: float
    left: float
    right: float
    drawn: bool

    def at(self, seconds: float) -> float:
        """Returns a share of the width."""
        return self.left + (self.right - self.left) * (seconds - self.start) / (self.end - self.start)


def undrawn(time: Timeline) -> list[tuple[float, float]]:
    """Returns when things happen that no event tells of: in further turns of loops, and after the last event."""
    ends = max([event.end for event in time.events], default=0.0)
    found = sorted((event.start, event.end) for event in time.events if TURNS.fullmatch(event.name))
    return found + ([(ends, time.seconds)] if ends < 0.99 * time.seconds else [])


def stretches(time: Timeline) -> list[Stretch]:
    """Returns a step from left to right, what is not drawn squeezed into a small part of the width."""
    hidden = [(start, end) for start, end in undrawn(time) if end > start]
    squeezed = [min((end - start) / time.seconds, _SQUEEZED / len(hidden)) for start, end in hidden]
    visible = time.seconds - sum(end - start for start, end in hidden)
    rate = (1 - sum(squeezed)) / visible if visible > 0 else 0.0
    found, at, left = [], 0.0, 0.0
    for (start, end), width in zip([*hidden, (time.seconds, time.seconds)], [*squeezed, 0.0], strict=True):
        right = left + (start - at) * rate
        if start > at:
            found.append(Stretch(at, start, left, right, drawn=True))
        if end > start:
            found.append(Stretch(start, end, right, right + width, drawn=False))
        at, left = end, right + width
    return found


def share_of(seconds: float, step: Sequence[Stretch]) -> float:
    """Returns where a time is, as a share of the width."""
    here = next((stretch for stretch in step if seconds <= stretch.end), step[-1])
    return min(max(here.at(seconds), 0.0), 1.0)


@dataclass
class Span:
    """Events that are drawn together: from where to where, and what they are, with seconds."""

    left: float
    right: float
    start: float
    busy: dict[str, float]
    count: int = 1

    @property
    def what(self) -> str:
        """Returns what takes most of it."""
        return max(self.busy, key=lambda name: self.busy[name])


def spans(events: Iterable[Event], step: Sequence[Stretch]) -> list[Span]:
    """Returns the events of one stream, those narrower than a pixel together with their neighbours."""
    found: list[Span] = []
    small = False
    for event in sorted(events, key=lambda event: event.start):
        left, right, seconds = share_of(event.start, step), share_of(event.end, step), event.end - event.start
        narrow = right - left < _PIXEL
        last = found[-1] if found else None
        if last and small and narrow and left - last.right < _PIXEL and last.right - last.left < 4 * _PIXEL:
            last.right = max(last.right, right)
            last.busy[event.name] = last.busy.get(event.name, 0.0) + seconds
            last.count += 1
        else:
            found.append(Span(left, right, event.start, {event.name: seconds}))
        small = narrow
    return found


def timeline(time: Timeline) -> Markup:
    """Returns one lane of computation, one for each stream of collectives, and an axis."""
    step = stretches(time)
    places = [percent(share_of(at, step)) for at in ticks(step)]
    grid = [tag("line", x1=x, x2=x, y1="0", y2="100%", cls="jx-grid") for x in places]
    streams = ["compute", *sorted(time.communication, key=lambda stream: -time.communication[stream])]
    lanes = [_lane(time, stream, step, grid) for stream in streams]
    return tag("div", *lanes, tag("div"), _axis(step), cls="jx-timeline")


def _lane(time: Timeline, stream: str, step: Sequence[Stretch], grid: Sequence[Markup]) -> Markup:
    drawn = [_span(span, stream) for span in spans([e for e in time.events if e.stream == stream], step)]
    shades, words = [], f"{show_seconds(time.compute)} busy"
    if stream != "compute":
        shades = [tag("rect", x=percent(s.left), width=percent(s.right - s.left), height="100%", cls="jx-hidden")
                  for s in step if not s.drawn]  # fmt: skip
        exposed = show_seconds(time.exposed.get(stream, 0.0))
        words = f"{show_seconds(time.communication[stream])} busy, {exposed} exposed"
    name = tag("div", tag("b", stream), " ", tag("span", words, cls="jx-small"))
    label = f"{stream}: {words}"
    return join([name, tag("svg", *grid, *shades, *drawn, cls="jx-lane", role="img", aria_label=label)])


def _span(span: Span, stream: str) -> Markup:
    turns = TURNS.fullmatch(span.what) if span.count == 1 else None
    colour = "jx-turns" if turns else "jx-dot" if span.what in _PRODUCTS else "jx-op"
    if stream != "compute":
        colour = kind_class(span.what)
    what = span.what if span.count == 1 else f"{span.count} events, mostly {span.what}"
    title = f"{what}, {show_seconds(sum(span.busy.values()))}, at {show_seconds(span.start)}"
    width, left = max(span.right - span.left, _PIXEL), min(span.left, 1 - _PIXEL)
    drawn = _titled(left, width, colour, title, y="3", height="20")
    if turns and width > _LABELLED:
        look = None if width > 3 * _LABELLED else "jx-wide"
        words = tag("text", f"+{turns[1]}×", x=percent(left + width / 2), y="17", text_anchor="middle", cls=look)
        drawn = join([drawn, words])
    return drawn


def ticks(step: Sequence[Stretch]) -> list[float]:
    """Returns times to label: where a drawn stretch begins, and round ones; none too near to the one before.

    >>> ticks([Stretch(0.0, 1.7, 0.0, 1.0, True)])
    [0.0, 0.5, 1.0, 1.5]
    """
    seconds = sum(stretch.end - stretch.start for stretch in step if stretch.drawn) or step[-1].end
    power = 10.0 ** floor(log10(seconds / 4))
    gap = next(power * factor for factor in (1, 2, 5, 10) if seconds / (power * factor) <= 5)
    found, last = [], -1.0
    for stretch in step:
        turns = range(floor(stretch.start / gap) + 1, floor(stretch.end / gap) + 1)
        for at in [stretch.start, *(turn * gap for turn in turns)] if stretch.drawn else []:
            place, width = stretch.at(at), _LETTER * max(6, len(show_seconds(at)))
            if place - last >= (width if place <= _ENDING else 1.5 * width):
                found.append(at)
                last = place
    return found


def _axis(step: Sequence[Stretch]) -> Markup:
    labels = []
    for at in ticks(step):
        place = share_of(at, step)
        anchor = "start" if at == 0 else "end" if place > _ENDING else "middle"
        labels.append(tag("text", show_seconds(at) if at else "0", x=percent(place), y="12", text_anchor=anchor))
    return tag("svg", *labels, cls="jx-axis", aria_hidden="true")
