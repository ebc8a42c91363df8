"""Line charts over a common axis, as a drawing without scripts."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.html.markup import Markup, join, percent, swatch, tag

HEIGHT, WIDTH = 340, 1000  # units of the drawing; the width is stretched
_TICKS = 6  # maximum ticks of an axis


@dataclass(frozen=True, kw_only=True)
class Line:
    """A series.

    Attributes:
      name: Name in the legend.
      x: Shape [points].
      y: Shape [points]; values that are not finite are omitted.
      css_class: CSS class that has a colour.
      dashed: Whether the line is dashed.
    """

    name: str
    x: np.ndarray
    y: np.ndarray
    css_class: str
    dashed: bool = False


def chart(lines: Sequence[Line], *, x: str, y: str, show_x) -> Markup:
    """The chart, with its axes.

    Args:
      lines: At least one, each with a finite point.
      x: Title of the horizontal axis.
      y: Title of the vertical axis.
      show_x: Formats a tick of the horizontal axis.
    """
    finite = [np.isfinite(line.x) & np.isfinite(line.y) for line in lines]
    right = max(
        (float(line.x[mask].max()) for line, mask in zip(lines, finite, strict=True) if mask.any()), default=1.0
    )
    heights = np.concatenate([line.y[mask] for line, mask in zip(lines, finite, strict=True)])
    low, high = (float(heights.min()), float(heights.max())) if heights.size else (0.0, 1.0)
    pad = 0.05 * (high - low or abs(high)) or 0.5
    low, high, right = low - pad, high + pad, right or 1.0
    to_y = lambda value: HEIGHT * (1 - (value - low) / (high - low))  # noqa: E731
    rows, columns = ticks(low, high), [tick for tick in ticks(0, right) if tick <= 0.97 * right]
    grid = "".join(f"M0 {to_y(tick):.1f}H{WIDTH}" for tick in rows)
    grid += "".join(f"M{WIDTH * tick / right:.1f} 0V{HEIGHT}" for tick in columns)
    elements = [_path(grid, "jx-grid")]
    for line, mask in zip(lines, finite, strict=True):
        points = zip(WIDTH * line.x[mask] / right, to_y(line.y[mask]), strict=True)
        path = "L".join(f"{left:.1f} {top:.1f}" for left, top in points)
        if mask.sum() == 1:  # a point instead of a line
            elements.append(_path(f"M{path}h.01", f"jx-point {line.css_class}"))
        else:
            elements.append(
                _path(f"M{path}" if path else "M0 0", f"jx-line {line.css_class}" + " jx-dashed" * line.dashed)
            )
    size = {"viewBox": f"0 0 {WIDTH} {HEIGHT}", "preserveAspectRatio": "none"}
    side = [
        tag("text", f"{tick:.4g}", x="100%", dx="-7", y=f"{to_y(tick) + 4:.1f}", text_anchor="end") for tick in rows
    ]
    below = [tag("text", show_x(tick), x=percent(tick / right), y="14", text_anchor="middle") for tick in columns[1:]]
    legend = [tag("li", swatch(line.css_class, line.name)) for line in lines]
    field = tag(
        "div", tag("svg", *elements, **size, cls="jx-over", role="img", aria_label=f"{y} against {x}"), cls="jx-field"
    )
    return join([
        tag("ul", *legend, cls="jx-key"),
        tag("div", y, cls="jx-small"),
        tag("div", tag("svg", *side, cls="jx-side", aria_hidden="true"), field,
            tag("span"), tag("svg", *below, cls="jx-axis", aria_hidden="true"), cls="jx-plot"),
        tag("div", x, cls="jx-small jx-under"),
    ])  # fmt: skip


def ticks(low: float, high: float) -> list[float]:
    """Returns round numbers within a range, at most `_TICKS` + 1.

    >>> ticks(0, 9)
    [0.0, 2.0, 4.0, 6.0, 8.0]
    """
    unit = 10.0 ** np.floor(np.log10((high - low) / _TICKS))
    step = next(unit * n for n in (1, 2, 5, 10) if (high - low) / (unit * n) <= _TICKS)
    return [float(step * n) for n in range(int(np.ceil(low / step - 1e-9)), int(np.floor(high / step + 1e-9)) + 1)]


def _path(way: str, look: str) -> Markup:
    return tag("path", d=way, cls=look, vector_effect="non-scaling-stroke")
