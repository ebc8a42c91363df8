"""Stacked bars, as SVG without a script.

Widths are percentages of the page, so that text keeps its size on a phone.
"""

from collections.abc import Sequence

from jaxpar.html.markup import Markup, percent, tag, titled
from jaxpar.units import show_bytes

_MAGNIFIED = 0.15  # of the capacity: memory below is drawn once more


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
                else titled(at / scale, size / scale, colour, what)
            )
            at += size
    return tag("svg", *drawn, cls=cls, aria_hidden="true")


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
