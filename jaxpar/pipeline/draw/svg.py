"""The elements of a schedule's drawing: SVG without a script, in the reader's light or dark theme.

Every colour is set twice: plainly for old viewers, and with `light-dark()`, which follows the theme of the reader or
the notebook. Bars have the same colours in both themes. `label`, `heading` and `printable` escape all text.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from html import escape
from math import floor, log10

LEFT, RIGHT = 82, 74  # pixels: the margins
MIN_AXIS, NORMAL_AXIS, MAX_AXIS = 640, 1060, 2700  # pixels of the time axis
LETTER = 0.6  # width of a letter as a share of the font size, about
# of the first and the last chunk: blue, orange and bluish green after Okabe and Ito (2008), of unequal lightness
SHADES = {"F": ("#1c67a6", "#9ccbf0"), "B": ("#dd6f1b", "#f8c48c"), "W": ("#5cbd98", "#c0ecd9")}
# property, light, dark
STYLES = {
    "ground": ("fill", "#ffffff", "#15181d"),
    "ink": ("fill", "#1b1f24", "#e6e9ed"),
    "muted": ("fill", "#565e69", "#a6aeb9"),
    "idle": ("fill", "#f4f5f7", "#1e2229"),
    "hatch": ("stroke", "#c3cad3", "#424b58"),
    "cells rect": ("stroke", "#ffffff", "#15181d"),
    "rule": ("stroke", "#8d96a2", "#6b7480"),
    "kept": ("fill", "#dcd6ea", "#3d3656"),
    "curve": ("stroke", "#6a5a96", "#ab9cd6"),
    "peak": ("fill", "#6a5a96", "#ab9cd6"),
}
HATCH = 'fill="url(#jaxpar-idle)"'


@dataclass(frozen=True, slots=True)
class Sheet:
    """The scale of a drawing: from time to pixels, and the size of the numbers in the bars.

    Attributes:
      rate: Pixels per unit of time.
      width: Width in pixels, including margins.
      shortest: Width of the shortest bar, in pixels.
      size: Size of the numbers' font, in pixels.
    """

    rate: float
    width: float
    shortest: float
    size: float

    @classmethod
    def fit(cls, end: float, shortest: float, digits: int) -> "Sheet":
        """Chooses the scale at which the numbers fit into the shortest bar, unless the drawing would be too wide."""
        units = end / shortest
        width = min(max(MIN_AXIS, min(36 * units, NORMAL_AXIS), (8 * LETTER * digits + 2.5) * units), MAX_AXIS)
        size = min(13.0, max(8.0, (width / units - 2.5) / (LETTER * digits)))
        return cls(width / end, LEFT + width + RIGHT, width / units, size)

    def x(self, time: float) -> float:
        """Returns the x coordinate of a time, in pixels."""
        return LEFT + time * self.rate


def document(title: str, sheet: Sheet, height: float, elements: Iterable[str]) -> str:
    """Returns an SVG file with a title, a background, and these elements."""
    size = (
        f'width="{format_length(sheet.width)}" height="{format_length(height)}" viewBox="0 0 '
        f'{format_length(sheet.width)} {format_length(height)}"'
    )
    style = (
        # shrinks to its page; without specificity, so that a page that scrolls a drawing can override it
        ":where(.jaxpar-schedule){max-width:100%;height:auto}"
        ".jaxpar-schedule{color-scheme:light dark}"
        '[data-jp-theme-light="true"] .jaxpar-schedule,.vscode-light .jaxpar-schedule{color-scheme:light}'
        '[data-jp-theme-light="false"] .jaxpar-schedule,.vscode-dark .jaxpar-schedule{color-scheme:dark}'
    )
    for name, (key, light, dark) in STYLES.items():
        style += f"\n.jaxpar-schedule .jx-{name}{{{key}:{light};{key}:light-dark({light},{dark})}}"
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="jaxpar-schedule" {size} role="img" font-size="12" '
        'font-family="system-ui, -apple-system, Segoe UI, Roboto, Liberation Sans, sans-serif">\n'
        f"<title>{escape(printable(title))}</title>\n<style>{style}</style>\n"
        '<defs><pattern id="jaxpar-idle" width="6" height="6" patternUnits="userSpaceOnUse">'
        '<path d="M-1 7L7 -1M-1 1L1 -1M5 7L7 5" class="jx-hatch" stroke-width="1"/></pattern></defs>\n'
        f'<rect width="100%" height="100%" class="jx-ground"/>\n{"".join(elements)}\n</svg>\n'
    )


def label(x: float, y: float, words: str, *, anchor: str = "", size: int = 0) -> str:
    """Draws text in a muted colour."""
    attributes = f' text-anchor="{anchor}"' * bool(anchor) + f' font-size="{size}"' * bool(size)
    return (
        f'<text x="{format_length(x)}" y="{format_length(y)}"{attributes} '
        f'class="jx-muted">{escape(printable(words))}</text>'
    )


def heading(name: str, words: str, y: float, *, size: int = 13) -> str:
    """Draws a name in bold, followed by words in a muted colour."""
    return (
        f'<text x="20" y="{format_length(y)}" font-size="{size}" font-weight="650" '
        f'class="jx-ink">{escape(printable(name))}'
        f'<tspan dx="{0.6 * size:.0f}" font-size="{min(size, 16)}" font-weight="400" class="jx-muted">'
        f"{escape(printable(words))}</tspan></text>"
    )


def axis(end: float, sheet: Sheet, y: float) -> str:
    """Returns a time axis with round numbers."""
    power = 10.0 ** floor(log10(45 / sheet.rate))
    gap = next(power * factor for factor in (1, 2, 5, 10) if power * factor * sheet.rate >= 45)
    marks = [index * gap for index in range(floor(end / gap * (1 + 1e-9)) + 1)]
    path = f"M{LEFT} {format_length(y)}H{format_length(sheet.x(end))}" + "".join(
        f"M{format_length(sheet.x(mark))} {format_length(y)}v4" for mark in marks
    )
    labels = [label(sheet.x(mark), y + 16, f"{mark:.6g}", anchor="middle", size=11) for mark in marks]
    name = label(LEFT - 10, y + 16, "time", anchor="end", size=11)
    return f'<path d="{path}" class="jx-rule" fill="none"/>{name}{"".join(labels)}'


def shade(op: str, chunk: int, chunks: int) -> str:
    """Returns a chunk's colour, interpolated between the colours of the first and the last chunk."""
    share = chunk / (chunks - 1) if chunks > 1 else 0.0
    first, last = (bytes.fromhex(colour[1:]) for colour in SHADES[op])
    return "#" + bytes(round(a + share * (b - a)) for a, b in zip(first, last, strict=True)).hex()


def ink(colour: str) -> str:
    """Returns the colour of text on a colour: black or white, whichever has more contrast by WCAG 2.2.

    >>> ink("#1c67a6"), ink("#dd6f1b")
    ('#ffffff', '#000000')
    """
    parts = [part / 255 for part in bytes.fromhex(colour[1:])]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    light = sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))
    return "#000000" if (light + 0.05) ** 2 > 0.05 * 1.05 else "#ffffff"


def text_width(words: str, size: float) -> float:
    """Returns the approximate width of a text, in pixels."""
    return LETTER * size * len(words)


def printable(words: str) -> str:
    """Replaces characters that XML or a terminal cannot show."""
    return "".join(letter if letter.isprintable() else "?" for letter in words)


def format_length(number: float) -> str:
    """Formats a length, to a hundredth of a pixel."""
    return f"{number:.2f}".rstrip("0").rstrip(".")
