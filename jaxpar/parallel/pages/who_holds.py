"""Who holds what on a mesh: for each way in which parameters are placed, one of them, cut into its pieces.

    position of a device ──► its coordinate on each axis ──► the piece of each dim that those axes cut

A piece is drawn at its place in the array, with the numbers of the devices that hold it.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from math import prod

from jax.sharding import PartitionSpec

from jaxpar.html.markup import Markup, badge, join, table, tag
from jaxpar.mesh.axes import coordinates
from jaxpar.parallel.placement import Placement
from jaxpar.sharding.shard_bytes import pieces
from jaxpar.units import show_bytes

CARDS = 4  # ways of placing that are drawn at once; the others are folded
DRAWN, FEW = 8, 4  # pieces that are drawn side by side: up to eight, or four if there are more or each is wide
NUMBERS = 8  # devices of a piece that are numbered in a card that is two pieces wide; half of them in a wider one


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters that are placed alike.

    Attributes:
      places: Path of each to where it lives, the largest first.
    """

    places: Mapping[str, Placement]

    @property
    def bytes(self) -> int:
        """Bytes of all of them, whole."""
        return sum(place.leaf.bytes for place in self.places.values())


def groups(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> list[Group]:
    """Returns parameters by the axes that cut their dims in turn, those with most bytes first."""
    found: dict[tuple, dict[str, Placement]] = {}
    for path, place in places.items():
        found.setdefault(tuple(cuts(place, sizes)[0]), {})[path] = place
    sort = {key: dict(sorted(each.items(), key=lambda of: -of[1].leaf.bytes)) for key, each in found.items()}
    return sorted((Group(places=each) for each in sort.values()), key=lambda group: -group.bytes)


def cuts(place: Placement, sizes: Mapping[str, int]) -> tuple[list[tuple[str, ...]], list[int]]:
    """Returns the axes that cut each dim that is cut, outermost first, and which dims those are."""
    axes, dims = [], []
    for dim, entry in enumerate(place.stored):
        of_dim = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if large := tuple(axis for axis in of_dim if sizes[axis] > 1):
            axes.append(large)
            dims.append(dim)
    return axes, dims


def holders(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> dict[tuple[int, ...], list[int]]:
    """Returns each piece, by its number along every dim, with the positions in the mesh of the devices that hold it.

    >>> holders(PartitionSpec("fsdp"), 1, {"data": 2, "fsdp": 2})
    {(0,): [0, 2], (1,): [1, 3]}
    """
    entries = (*spec, *(None,) * (rank - len(spec)))
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    found: dict[tuple[int, ...], list[int]] = {}
    for device in range(prod(sizes.values())):
        where = coordinates(device, sizes)
        piece = []
        for of_dim in axes:
            at = 0
            for axis in of_dim:
                at = at * sizes[axis] + where[axis]
            piece.append(at)
        found.setdefault(tuple(piece), []).append(device)
    return found


def section(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> Markup:
    """Returns the drawings: one for each way of placing, the largest of its parameters."""
    cards = [_card(group, sizes) for group in groups(places, sizes)]
    shown, folded = cards[:CARDS], cards[CARDS:]
    drawn = [tag("div", *shown, cls="jx-cards")]
    if folded:
        words = f"{len(folded)} more way{'s' * (len(folded) > 1)} in which parameters are placed"
        drawn.append(tag("details", tag("summary", words), tag("div", *folded, cls="jx-cards")))
    return join(drawn)


def listed(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> Markup:
    """Returns all parameters as a table: where each goes, its bytes on a device, and why."""
    rows = [
        (path, place.describe(sizes), " × ".join(map(str, place.leaf.shape)) or "scalar",
         show_bytes(place.per_device(sizes)), place.why)
        for path, place in places.items()
    ]  # fmt: skip
    head = ("parameter", "placed as", "shape", "per device", "because")
    words = f"All {len(rows)} arrays, and the rule that placed each"
    return tag("details", tag("summary", words), table("Parameters", head, rows, "sstnw"))


def _card(group: Group, sizes: Mapping[str, int]) -> Markup:
    path, place = next(iter(group.places.items()))
    more, whole = len(group.places) - 1, place.leaf.bytes
    others = tag("span", f" and {more} more" if more else "", cls="jx-small", title=", ".join([*group.places][1:]))
    each = place.per_device(sizes)
    count = prod(pieces(place.stored, len(place.leaf.shape), sizes))
    kept = (
        f"{show_bytes(whole)} in {count} pieces; {show_bytes(each)} on each device"
        if count > 1
        else f"{show_bytes(whole)}, whole on each device"
    )
    return tag(
        "div",
        tag("div", tag("b", path), others),
        tag("div", tag("code", place.describe(sizes)), " ", "×".join(map(str, place.leaf.shape)), cls="jx-small"),
        _pieces(place, sizes),
        tag("div", kept, " ", badge("exact"), cls="jx-small"),
        cls="jx-card",
    )  # fmt: skip


def _pieces(place: Placement, sizes: Mapping[str, int]) -> Markup:
    """Returns the array, cut: its last dim that is cut runs to the right, those before it downwards."""
    rank = len(place.leaf.shape)
    counts, held = pieces(place.stored, rank, sizes), holders(place.stored, rank, sizes)
    cut = [dim for dim, count in enumerate(counts) if count > 1]
    across = cut[-1:] if cut and (len(cut) > 1 or cut[-1] == rank - 1) else []
    down = [dim for dim in cut if dim not in across]
    columns = prod(counts[dim] for dim in across)
    rows = list(product(*(range(counts[dim]) for dim in down)))
    wide = columns if columns <= (DRAWN if len(held) == prod(sizes.values()) else FEW) else FEW
    high = len(rows) if len(rows) * wide <= 2 * DRAWN else FEW
    drawn = []
    for number, row in enumerate(rows[:high]):
        for column in range(wide):
            at = dict(zip(down, row, strict=True)) | dict.fromkeys(across, column)
            piece = tuple(at.get(dim, 0) for dim in range(rank))
            look = f"jx-c{(number * columns + column) % 9}" if cut else "jx-whole"
            numbers = _numbers(held[piece], NUMBERS if wide <= 2 else NUMBERS // 2)
            drawn.append(tag("div", *numbers, cls=f"jx-piece {look}"))
    less = wide < columns or high < len(rows)
    beyond = [tag("div", f"the first of {len(rows)} × {columns} pieces", cls="jx-small")] if less else []
    grid = tag("div", *drawn, cls="jx-pieces", style=f"grid-template-columns: repeat({wide}, minmax(0, 1fr))")
    return join([grid, *beyond])


def _numbers(devices: Sequence[int], most: int) -> list[Markup]:
    shown = [tag("span", str(device), cls="jx-chip") for device in devices[:most]]
    left = len(devices) - most
    return [*shown, *([tag("span", f"+ {left}", cls="jx-chip", title=f"and {left} more devices")] if left > 0 else [])]
