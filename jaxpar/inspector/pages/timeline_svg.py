"""The drawing of a modelled step: a lane for computation, one for each stream of collectives.

What no event tells of, such as the fourth to last turn of a loop, is squeezed into a small part of the width.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10

from jaxpar.html.markup import Markup, join, percent, tag, titled
from jaxpar.inspector.pages.mesh_svg import kind_class
from jaxpar.inspector.timeline import Event, Timeline
from jaxpar.units import show_seconds

_PIXEL = 1 / 600  # of a step: what is narrower is drawn together with its neighbours
_SQUEEZED = 0.25  # of the width, at most, for all that is not drawn
_LABELLED = 0.03  # of the width: a block that has room for a few letters
_ENDING = 0.94  # of the width: labels of time end where they belong, rather than being centred
_LETTER = 0.02  # of the width: of a label of time, on a phone
TURNS = re.compile(r"(\d+) more turns of the loop")
_PRODUCTS = ("dot_general", "conv_general_dilated")


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
    """Events that are drawn together: their start, their end, and the seconds of each operation."""

    left: float
    right: float
    start: float
    busy: dict[str, float]
    count: int = 1

    @property
    def what(self) -> str:
        """Returns the operation that takes most of its time."""
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
    rows = [_row(time, stream, step, grid) for stream in streams]
    return tag("div", *rows, tag("div"), _axis(step), cls="jx-timeline")


def _row(time: Timeline, stream: str, step: Sequence[Stretch], grid: Sequence[Markup]) -> Markup:
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
    drawn = titled(left, width, colour, title, y="3", height="20")
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
