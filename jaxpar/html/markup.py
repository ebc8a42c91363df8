"""Builds HTML with `tag`, which escapes all text except `Markup`."""

from collections.abc import Iterable, Sequence
from html import escape

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
