"""Draws sharded arrays as cards, with the devices that hold each shard. Needs no JAX, because a run records the cards.

A card is one array; a box in it is a shard, at its place in the array.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.html.markup import Markup, badge, breakable, join, table, tag

CARDS = 4  # cards shown at once; the others are folded
COLOURS = 9


@dataclass(frozen=True, kw_only=True)
class Shard:
    """A shard of an array.

    Attributes:
      number: Index in the array; -1 if the array is not sharded.
      devices: The first of the devices that hold it.
      more: Number of further devices.
    """

    number: int
    devices: Sequence[int]
    more: int


@dataclass(frozen=True, kw_only=True)
class Card:
    """A sharded array.

    Attributes:
      name: Path of the array.
      more: Number of further arrays with the same sharding.
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
