"""Arrays that are cut into pieces, with the numbers of the devices that hold each. Takes no jax: a run records them.

A card is one array; a box in it is a piece, at its place in the array.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.html.markup import Markup, badge, join, table, tag

CARDS = 4  # that are drawn at once; the others are folded
COLOURS = 9


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A piece of an array.

    Attributes:
      number: In the array; -1 if it is not cut.
      devices: That hold it, the first of them.
      more: How many besides.
    """

    number: int
    devices: Sequence[int]
    more: int


@dataclass(frozen=True, kw_only=True)
class Card:
    """An array, cut.

    Attributes:
      name: Its path.
      more: Arrays that are cut likewise.
      placed: `f32[embed/fsdp, mlp/tensor]`.
      shape: `128×512`.
      kept: Its bytes, whole and on a device, in words.
      rows: The pieces that are drawn, row by row, as many in each.
      less: Of how many, in words, if not all are; else "".
    """

    name: str
    more: int
    placed: str
    shape: str
    kept: str
    rows: Sequence[Sequence[Piece]]
    less: str

    @classmethod
    def of(cls, recorded: dict[str, Any]) -> "Card":
        """Returns a card from what `dataclasses.asdict` made of it.

        Raises:
          TypeError, KeyError: If it is none.
        """
        made: dict[str, Any] = recorded | {"rows": [[Piece(**piece) for piece in row] for row in recorded["rows"]]}
        return cls(**made)


def section(cards: Sequence[Card]) -> Markup:
    """Returns the drawings of cards."""
    drawn = [_card(card) for card in cards]
    shown, folded = drawn[:CARDS], drawn[CARDS:]
    words = "A box is a piece of an array, at its place in it; the numbers are the devices that hold it. "
    made = [tag("p", words, "Grey is whole on every device.", cls="jx-small"), tag("div", *shown, cls="jx-cards")]
    if folded:
        words = f"{len(folded)} more way{'s' * (len(folded) > 1)} in which parameters are placed"
        made.append(tag("details", tag("summary", words), tag("div", *folded, cls="jx-cards")))
    return join(made)


def axes_table(rows: Sequence[Sequence[str]]) -> Markup:
    """Returns a table of the axes of a mesh: a group of devices that talk along each, what joins them, what they send.

    Args:
      rows: Name and size of an axis, what its devices have, such a group, what joins it, what is sent in a step.
    """
    if not rows:
        return Markup()
    head = ("axis", "its devices have", "such as devices", "joined", "what they send each other in a step")
    words = " What is sent of activations depends on the batch: jp.inspect(step, batch)."
    note = tag("p", "Bytes of arrays as they are stored; ", badge("exact"), words, cls="jx-small")
    return join([table("Axes", head, [(tag("b", row[0]), *row[1:]) for row in rows], "tttsw"), note])


def _card(card: Card) -> Markup:
    others = tag("span", f" and {card.more} more", cls="jx-small") if card.more else ""
    boxes = [tag("div", *_numbers(piece), cls=f"jx-piece {_look(piece)}") for row in card.rows for piece in row]
    wide = len(card.rows[0]) if card.rows else 1
    grid = tag("div", *boxes, cls="jx-pieces", style=f"grid-template-columns: repeat({wide}, minmax(0, 1fr))")
    less = [tag("div", card.less, cls="jx-small")] if card.less else []
    return tag(
        "div",
        tag("div", tag("b", card.name), others),
        tag("div", tag("code", card.placed), " ", card.shape, cls="jx-small"),
        grid,
        *less,
        tag("div", card.kept, " ", badge("exact"), cls="jx-small"),
        cls="jx-card",
    )


def _look(piece: Piece) -> str:
    return "jx-whole" if piece.number < 0 else f"jx-c{piece.number % COLOURS}"


def _numbers(piece: Piece) -> list[Markup]:
    shown = [tag("span", str(device), cls="jx-chip") for device in piece.devices]
    more = tag("span", f"+ {piece.more}", cls="jx-chip", title=f"and {piece.more} more devices")
    return [*shown, *[more] * bool(piece.more)]
