"""The drawing of a modelled step: a lane for computation, one per stream of collectives.

Periods without events, such as all iterations of a loop from the fourth on, get only a small part of the width.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import floor, log10

from jaxpar.html.markup import Markup, join, percent, rect_with_tooltip, tag
from jaxpar.inspector.pages.mesh_svg import kind_class
from jaxpar.inspector.timeline import Timeline, TimelineEvent
from jaxpar.units import show_seconds

_PIXEL = 1 / 600  # share of a step: narrower events are drawn together with their neighbours
_SQUEEZED = 0.25  # maximum share of the width for all periods that are not drawn
_LABELLED = 0.03  # share of the width: minimum block width for a label of a few letters
_ENDING = 0.94  # share of the width: from here on time labels are right-aligned, not centred
_LETTER = 0.02  # share of the width: one letter of a time label, on a phone
TURNS = re.compile(r"(\d+) more turns of the loop")
_PRODUCTS = ("dot_general", "conv_general_dilated")


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
