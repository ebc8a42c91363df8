"""Renders the curves of several methods as one HTML file, and as a text table."""

from collections.abc import Sequence

import numpy as np

from jaxpar.html.charts import Line, chart
from jaxpar.html.markup import badge, document, table, tag
from jaxpar.job.compare.training import Curve
from jaxpar.units import show_bytes, show_count, show_seconds

POINTS = 60  # maximal points per line; each is a mean over some updates
_LOOKS = tuple(f"jx-k{i}" for i in range(5)) + tuple(f"jx-c{i}" for i in range(10))
_HEAD = ("method", "", "eval loss", "examples", "bytes a device sent", "virtual time", "staleness")
MEANT = {
    "run": "trained as jaxpar train does",
    "simulated": "gradients and updates are computed exactly, in the order of a virtual clock: JAX runs nothing late",
    "modelled": "a formula; nothing was measured",
}


def rows(curves: Sequence[Curve]) -> list[tuple[str, ...]]:
    """Returns a table row per curve, the lowest evaluation loss first."""
    ordered = sorted(curves, key=lambda curve: (np.isnan(curve.eval_loss), curve.eval_loss))
    return [
        (
            curve.method.name,
            "run" if curve.method.runs else "simulated",
            "-" if np.isnan(curve.eval_loss) else f"{curve.eval_loss:.4f}",
            show_count(curve.samples[-1]),
            show_bytes(curve.bytes[-1]),
            show_seconds(curve.seconds[-1]),
            f"{curve.staleness:.3g}",
        )
        for curve in ordered
    ]


def text(curves: Sequence[Curve]) -> str:
    """Formats the table as text."""
    cells = [_HEAD, *rows(curves)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(_HEAD))]
    lines = [
        "  ".join(
            cell.ljust(width) if place < 2 else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in cells
    ]
    return "\n".join(lines)


def render(curves: Sequence[Curve], *, title: str, law: str, compute: float, link_note: str) -> str:
    """Renders the page as HTML.

    Args:
      curves: At least one curve.
      title: The title of the page.
      law: The distribution of gradient times, as the user wrote it.
      compute: The mean gradient time in seconds.
      link_note: A description of the link.
    """
    subtitle = f"gradients take {show_seconds(compute)} in the mean ({law}); {link_note}"
    styles = {curve.method.name: _LOOKS[i % len(_LOOKS)] for i, curve in enumerate(curves)}
    charts = [
        ("Against examples", "samples", "examples that were used", show_count),
        ("Against bytes", "bytes", "bytes that a device has sent", lambda x: f"{show_count(x)}B"),
        ("Against virtual seconds", "seconds", "seconds on the virtual clock, modelled", lambda x: f"{x:.4g} s"),
    ]
    sections = [
        tag("section", tag("h2", name), chart(
            [_line(curve, key, styles[curve.method.name]) for curve in curves],
            x=x, y="loss of the examples of an update", show_x=show,
        ))
        for name, key, x, show in charts
    ]  # fmt: skip
    badges = [word for word in MEANT if word != "simulated" or not all(curve.method.runs for curve in curves)]
    return document(
        title,
        tag("p", subtitle, " ", badge("modelled"), cls="jx-where"),
        table("Methods", _HEAD, [(name, badge(kind), *cells) for name, kind, *cells in rows(curves)], "ttnnnnn"),
        *sections,
        tag("ul", *[tag("li", badge(word), f" {MEANT[word]}") for word in badges], cls="jx-key jx-legend"),
    )


def _line(curve: Curve, key: str, look: str) -> Line:
    """Plots the loss of a curve against one of its arrays, binned to at most `POINTS` means."""
    bins = np.array_split(np.arange(len(curve.loss)), min(POINTS, len(curve.loss)))
    x, y = (np.array([float(array[part].mean()) for part in bins]) for array in (getattr(curve, key), curve.loss))
    name = curve.method.name if curve.method.runs else f"{curve.method.name} (simulated)"
    return Line(name=name, x=x, y=y, css_class=look, dashed=not curve.method.runs)
