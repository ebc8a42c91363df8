"""Lines over a common axis, as a drawing without scripts: several series, one of whose axes is shared."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.html.markup import Markup, join, percent, swatch, tag

HEIGHT, WIDTH = 340, 1000  # units of the drawing; the width is stretched
_TICKS = 6  # at most, of an axis


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series.

    Attributes:
      name: For the legend.
      x: Shape [points].
      y: Shape [points]; what is not finite is left out.
      look: A class of the page that has a colour.
      dashed: Whether it is drawn so.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    look: str
    dashed: bool = False


def chart(lines: Sequence[Line], *, x: str, y: str, show_x) -> Markup:
    """Returns the drawing, with its axes.

    Args:
      lines: At least one, each with a point that is finite.
      x: What the axis below is.
      y: What the axis at the side is.
      show_x: Returns a tick of the axis below as text.
    """
    finite = [np.isfinite(line.x) & np.isfinite(line.y) for line in lines]
    right = max(
        (float(line.x[mask].max()) for line, mask in zip(lines, finite, strict=True) if mask.any()), default=1.0
    )
    heights = np.concatenate([line.y[mask] for line, mask in zip(lines, finite, strict=True)])
    low, high = (float(heights.min()), float(heights.max())) if heights.size else (0.0, 1.0)
    pad = 0.05 * (high - low or abs(high)) or 0.5
    low, high, right = low - pad, high + pad, right or 1.0
    up = lambda value: HEIGHT * (1 - (value - low) / (high - low))  # noqa: E731
    rows, columns = ticks(low, high), [each for each in ticks(0, right) if each <= 0.97 * right]
    grid = "".join(f"M0 {up(each):.1f}H{WIDTH}" for each in rows)
    grid += "".join(f"M{WIDTH * each / right:.1f} 0V{HEIGHT}" for each in columns)
    drawn = [_path(grid, "jx-grid")]
    for line, mask in zip(lines, finite, strict=True):
        points = zip(WIDTH * line.x[mask] / right, up(line.y[mask]), strict=True)
        way = "L".join(f"{left:.1f} {top:.1f}" for left, top in points)
        if mask.sum() == 1:  # no line, but a point
            drawn.append(_path(f"M{way}h.01", f"jx-point {line.look}"))
        else:
            drawn.append(_path(f"M{way}" if way else "M0 0", f"jx-line {line.look}" + " jx-dashed" * line.dashed))
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "preserveAspectRatio": "none"}
    side = [tag("text", f"{each:.4g}", x="100%", dx="-7", y=f"{up(each) + 4:.1f}", text_anchor="end") for each in rows]
    below = [tag("text", show_x(each), x=percent(each / right), y="14", text_anchor="middle") for each in columns[1:]]
    key = [tag("li", swatch(line.look, line.name)) for line in lines]
    field = tag(
        "div", tag("svg", *drawn, **size, cls="jx-over", role="img", aria_label=f"{y} against {x}"), cls="jx-field"
    )
    return join([
        tag("ul", *key, cls="jx-key"),
        tag("div", y, cls="jx-small"),
        tag("div", tag("svg", *side, cls="jx-side", aria_hidden="true"), field,
            tag("span"), tag("svg", *below, cls="jx-axis", aria_hidden="true"), cls="jx-plot"),
        tag("div", x, cls="jx-small jx-under"),
    ])  # fmt: skip


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers within a range, at most `_TICKS` and one.

    >>> ticks(0, 9)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    unit = 10.0 ** np.floor(np.log10((high - low) / _TICKS))
    step = next(unit * each for each in (1, 2, 5, 10) if (high - low) / (unit * each) <= _TICKS)
    return [
        float(step * each) for each in range(int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9)) + 1)
    ]


def _path(way: str, look: str) -> Markup:
    return tag("path", d=way, cls=look, vector_effect="non-scaling-stroke")
