"""Drawings of a page without scripts: line charts over a common axis, and sharded arrays as cards.

A card is one array; a box in it is a shard, at its place in the array, with the devices that hold it. Nothing here
needs JAX, because a run records its cards.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from jaxpar.html.markup import Markup, badge, breakable, join, percent, swatch, table, tag

HEIGHT, WIDTH = 340, 1000  # units of the drawing; the width is stretched
_TICKS = 6  # maximum ticks of an axis
CARDS = 4  # cards shown at once; the others are folded
COLOURS = 9


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


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of an array.

    Attributes:
      number: Index in the array; -1 if the array is not sharded.
      devices: The first of the devices that hold it.
      more: Number of devices that hold it besides `devices`.
    """

    number: int
    devices: Sequence[int]
    more: int


@dataclass(frozen=True, kw_only=True)
class Card:
    """A sharded array.

    Attributes:
      name: Path of the array.
      more: Number of other arrays with the same sharding, for which this card also stands.
      placed: Dims and their axes, `f32[embed/fsdp, mlp/tensor]`.
      shape: `128×512`.
      kept: Bytes of the array, in total and per device, as text.
      rows: The drawn shards, row by row.
      less: Text with the number of shards, if not all are drawn; else "".
    """

    name: str
    more: int
    placed: str
    shape: str
    kept: str
    rows: Sequence[Sequence[Shard]]
    less: str

    @classmethod
    def from_record(cls, record: dict[str, Any]) -> "Card":
        """Restores a card from `dataclasses.asdict`.

        Raises:
          TypeError, KeyError: If the fields do not fit.
        """
        fields: dict[str, Any] = record | {"rows": [[Shard(**piece) for piece in row] for row in record["rows"]]}
        return cls(**fields)


def section(cards: Sequence[Card]) -> Markup:
    """The drawings of cards."""
    drawings = [_card(card) for card in cards]
    visible, folded = drawings[:CARDS], drawings[CARDS:]
    words = "A box is a piece of an array, at its place in it; the numbers are the devices that hold it. "
    elements = [tag("p", words, "Grey is whole on every device.", cls="jx-small"), tag("div", *visible, cls="jx-cards")]
    if folded:
        words = f"{len(folded)} more way{'s' * (len(folded) > 1)} in which parameters are placed"
        elements.append(tag("details", tag("summary", words), tag("div", *folded, cls="jx-cards")))
    return join(elements)


def axes_table(rows: Sequence[Sequence[str]]) -> Markup:
    """A table of mesh axes: an example group of devices, what connects them, and what they send.

    Args:
      rows: Axis name and size, what its devices hold, an example group, its connection, what is sent in a step.
    """
    if not rows:
        return Markup()
    head = ("axis", "its devices have", "such as devices", "joined", "what they send each other in a step")
    words = ". What is sent of activations depends on the batch: jp.inspect(step, batch)."
    note = tag("p", "Bytes of arrays as they are stored: ", badge("exact"), words, cls="jx-small")
    return join([table("Axes", head, [(tag("b", row[0]), *row[1:]) for row in rows], "tttsw"), note])


def _card(card: Card) -> Markup:
    count_note = tag("span", f" and {card.more} more", cls="jx-small") if card.more else ""
    boxes = [tag("div", *_numbers(piece), cls=f"jx-piece {_look(piece)}") for row in card.rows for piece in row]
    columns = len(card.rows[0]) if card.rows else 1
    grid = tag("div", *boxes, cls="jx-pieces", style=f"grid-template-columns: repeat({columns}, minmax(0, 1fr))")
    size_note = [tag("div", card.less, cls="jx-small")] if card.less else []
    return tag(
        "div",
        tag("div", tag("b", breakable(card.name)), count_note),
        tag("div", tag("code", card.placed), " ", card.shape, cls="jx-small"),
        grid,
        *size_note,
        tag("div", card.kept, " ", badge("exact"), cls="jx-small"),
        cls="jx-card",
    )


def _look(piece: Shard) -> str:
    return "jx-whole" if piece.number < 0 else f"jx-c{piece.number % COLOURS}"


def _numbers(piece: Shard) -> list[Markup]:
    chips = [tag("span", str(device), cls="jx-chip") for device in piece.devices]
    overflow_chip = tag("span", f"+ {piece.more}", cls="jx-chip", title=f"and {piece.more} more devices")
    return [*chips, *[overflow_chip] * bool(piece.more)]
