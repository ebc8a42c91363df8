"""Builds a page as one HTML file, without network access or scripts, for screens, phones, paper and notebooks.

A content security policy forbids scripts and external resources, in addition to the escaping of `tag`.
"""

from collections.abc import Sequence
from functools import cache
from importlib.resources import files

from jaxpar.html.markup import Markup, badge, percent, rect_with_tooltip, tag
from jaxpar.units import show_bytes

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, *body: str) -> str:
    """A page with a title and a body."""
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", name="color-scheme", content="light dark"),
        tag("meta", http_equiv="Content-Security-Policy", content=_POLICY),
        tag("title", title),
        tag("style", Markup(style())),
    )
    main = tag("main", tag("h1", title), *body)
    return in_ascii("<!DOCTYPE html>\n" + tag("html", head, tag("body", main, cls="jaxpar jx-page"), lang="en") + "\n")


def tile(name: str, number: str, note: str, provenance: str) -> Markup:
    """A headline number: its name and provenance, the number, and a few more words."""
    return tag("div", tag("div", tag("span", name), badge(provenance), cls="jx-name"), tag("b", number),
               tag("div", note, cls="jx-small"))  # fmt: skip


def in_ascii(text: str) -> str:
    """Encodes HTML as ASCII, so that any encoding preserves it, even file names with invalid characters."""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


@cache
def style() -> str:
    """Returns the style of all pages; it applies only to these pages."""
    return files("jaxpar.html").joinpath("page.css").read_text("utf-8")


# Stacked bars, as SVG without a script.

_MAGNIFIED = 0.15  # share of the capacity: memory below it is also drawn magnified


def bar(parts: Sequence[tuple[str, str, float]], scale: float, *, cls: str = "jx-bar") -> Markup:
    """A stacked bar.

    Args:
      parts: (class, tooltip, size) from the left.
      scale: Size that corresponds to the full width.
      cls: Class of the drawing.
    """
    scale, offset, shapes = scale if scale > 0 else 1.0, 0.0, []
    for colour, title, size in parts:
        if size > 0:
            shapes.append(
                tag("rect", x=percent(offset / scale), width=percent(size / scale), height="100%", cls=colour)
                if not title
                else rect_with_tooltip(offset / scale, size / scale, colour, title)
            )
            offset += size
    return tag("svg", *shapes, cls=cls, aria_hidden="true")


def memory_bar(parts: Sequence[tuple[str, str, float]], total: float, capacity: float | None) -> Markup:
    """Draws memory by cause against a capacity; magnifies it if it is a small part of the capacity.

    Args:
      parts: (class, tooltip, bytes).
      total: Bytes needed.
      capacity: Bytes available; None if unknown.
    """
    scale = max(total, capacity or 0, 1)
    stacked = bar(parts, scale, cls="jx-stack")
    if not capacity:
        return tag("div", stacked, cls="jx-memory")
    end = capacity / scale
    body = [_caption(end, f"{show_bytes(capacity)} for a program"), tag("div", stacked, _limit(end), cls="jx-limited")]
    if total < _MAGNIFIED * capacity:
        x = percent(total / scale)
        lines = [tag("line", x1="0", x2="0", y1="0", y2="100%"), tag("line", x1=x, x2="100%", y1="0", y2="100%")]
        body += [tag("svg", *lines, cls="jx-zoom", aria_hidden="true"), bar(parts, total, cls="jx-stack"),
                 _caption(1.0, f"{show_bytes(total)}, magnified")]  # fmt: skip
    return tag("div", *body, cls="jx-memory")


def _limit(share: float) -> Markup:
    marks = [tag("line", x1=percent(share), x2=percent(share), y1="0", y2="100%", cls="jx-limit")]
    if share < 1:
        marks.insert(0, tag("rect", x=percent(share), width=percent(1 - share), y="0", height="100%", cls="jx-beyond"))
    return tag("svg", *marks, cls="jx-stack jx-marks", aria_hidden="true")


def _caption(share: float, words: str) -> Markup:
    label = tag("text", words, x=percent(share), y="12", text_anchor="end" if share > 0.5 else "start")
    return tag("svg", label, cls="jx-axis", aria_hidden="true")
