"""A page as one HTML file: no network, no script; for a screen, a phone, paper, and a notebook.

A content security policy forbids scripts and external resources, in addition to the escaping of `tag`.
"""

from functools import cache
from importlib.resources import files

from jaxpar.html.markup import Markup, badge, tag

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
    """HTML that survives any encoding, even if a file's name holds bytes that are no characters."""
    return text.encode("ascii", "xmlcharrefreplace").decode("ascii")


@cache
def style() -> str:
    """The style of all pages; it does not affect anything outside of them."""
    return files("jaxpar.html").joinpath("page.css").read_text("utf-8")
