"""A page as one HTML file: no network, no script; for a screen, a phone, paper, and a notebook.

The page's own policy forbids scripts and anything from elsewhere, besides what `tag` escapes.
"""

from functools import cache
from importlib.resources import files

from jaxpar.html.markup import Markup, badge, tag

_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def document(title: str, *body: str) -> str:
    """Returns a page with a title and a body."""
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


def tile(name: str, number: str, more: str, how: str) -> Markup:
    """Returns a headline number: its name and what it is, the number, a few words more."""
    return tag("div", tag("div", tag("span", name), badge(how), cls="jx-name"), tag("b", number),
               tag("div", more, cls="jx-small"))  # fmt: skip


def in_ascii(text: str) -> str:
    """Returns HTML that survives any encoding, also where a file's name holds bytes that are no characters."""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


@cache
def style() -> str:
    """Returns the style of all pages; it touches nothing outside of them."""
    return files("jaxpar.html").joinpath("page.css").read_text("utf-8")
