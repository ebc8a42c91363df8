"""Builds HTML pages: `tag` escapes all text except `Markup`, and `document` makes one file of a page.

A page needs no network access and no scripts, and is for screens, phones, paper and notebooks. A content security
policy forbids scripts and external resources, in addition to the escaping.
"""

from collections.abc import Iterable, Sequence
from functools import cache
from html import escape
from importlib.resources import files

from jaxpar.units import show_bytes

_EMPTY = ("br", "line", "meta", "path", "rect")
HOW = {
    "exact": "arithmetic on shapes and specs",
    "compiled": "XLA said so",
    "modelled": "a formula; nothing was measured",
}


class Markup(str):
    """HTML in which all text is escaped."""

    __slots__ = ()


def tag(element: str, /, *inside: str, **attributes: str | None) -> Markup:
    """Builds an element.

    Args:
      element: Tag name.
      *inside: Text, which is escaped, and markup, which is not.
      **attributes: `cls` is `class`, `_` is `-`; attributes that are None are left out.

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
    """Concatenates text and markup, the text escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def breakable(path: str) -> Markup:
    """A path that a narrow page breaks after a slash rather than inside a word."""
    return Markup("/<wbr/>".join(escape(word) for word in path.split("/")))


def percent(share: float) -> str:
    """Formats a share as a length in SVG."""
    return f"{100 * share:.2f}".rstrip("0").rstrip(".") + "%"


def rect_with_tooltip(
    offset: float, width: float, colour: str, title: str, *, y: str = "0", height: str = "100%"
) -> Markup:
    """A rectangle with a tooltip."""
    place = f'x="{percent(offset)}" y="{y}" width="{percent(width)}" height="{height}" class="{colour}"'
    return Markup(f"<rect {place}><title>{escape(title)}</title></rect>")


def badge(word: str) -> Markup:
    """A badge for the provenance of a number, one of `HOW`."""
    return tag("span", word, cls="jx-how", title=HOW.get(word))


def swatch(colour: str, text: str) -> Markup:
    """An entry of a legend: a colour and its meaning."""
    return join([tag("i", cls=f"jx-swatch {colour}"), text])


def heading(*inside: str) -> Markup:
    """The head of a part of a section; no `h3`, which a notebook would list among its own headings."""
    return tag("div", *inside, cls="jx-head", role="heading", aria_level="3")


def table(name: str, head: Sequence[str], rows: Iterable[Sequence[str]], column_styles: str) -> Markup:
    """A table that scrolls by itself if it is too wide.

    Args:
      name: Label for screen readers.
      head: Column titles.
      rows: Cells.
      column_styles: Per column: `n` a number, `t` a word or two, `s` text that may break anywhere, `w` text that
        takes the space.
    """
    classes = [None if look == "t" else f"jx-{look}" for look in column_styles]
    top = tag("tr", *[tag("th", title, scope="col", cls=look) for title, look in zip(head, classes, strict=True)])
    body = [tag("tr", *[tag("td", cell, cls=look) for cell, look in zip(row, classes, strict=True)]) for row in rows]
    table = tag("table", tag("thead", top), tag("tbody", *body))
    return tag("div", table, cls="jx-scroll", role="region", tabindex="0", aria_label=name)


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
