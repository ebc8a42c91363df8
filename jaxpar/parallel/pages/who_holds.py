"""Who holds what on a mesh: for each way in which parameters are placed, one of them, cut into its pieces.

    position of a device ──► its coordinate on each axis ──► the piece of each dim that those axes cut

A piece is drawn at its place in the array, with the numbers of the devices that hold it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

from jax.sharding import PartitionSpec

from jaxpar.html.markup import Markup, table, tag
from jaxpar.html.pieces import Card, Piece
from jaxpar.mesh.axes import coordinates
from jaxpar.parallel.placement import Placement
from jaxpar.sharding.shard_bytes import pieces
from jaxpar.units import show_bytes

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


def cards(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> list[Card]:
    """Returns a card for each way of placing, of the largest of its parameters."""
    return [_card(group, sizes) for group in groups(places, sizes)]


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


def _card(group: Group, sizes: Mapping[str, int]) -> Card:
    path, place = next(iter(group.places.items()))
    shape, whole, each = place.leaf.shape, place.leaf.bytes, place.per_device(sizes)
    count = prod(pieces(place.stored, len(shape), sizes))
    rows, less = _rows(place, sizes)
    kept = f"{show_bytes(whole)} in {count} pieces; {show_bytes(each)} on each device"
    return Card(
        name=path, more=len(group.places) - 1, placed=place.describe(sizes),
        shape="×".join(map(str, shape)) or "scalar",
        kept=kept if count > 1 else f"{show_bytes(whole)}, whole on each device", rows=rows, less=less,
    )  # fmt: skip


def _rows(place: Placement, sizes: Mapping[str, int]) -> tuple[list[list[Piece]], str]:
    """Returns the pieces that are drawn, and of how many if not all.

    The last dim that is cut runs to the right, those before it downwards.
    """
    rank = len(place.leaf.shape)
    counts, held = pieces(place.stored, rank, sizes), holders(place.stored, rank, sizes)
    cut = [dim for dim, count in enumerate(counts) if count > 1]
    across = cut[-1:] if cut and (len(cut) > 1 or cut[-1] == rank - 1) else []
    down = [dim for dim in cut if dim not in across]
    columns = prod(counts[dim] for dim in across)
    rows = list(product(*(range(counts[dim]) for dim in down)))
    wide = columns if columns <= (DRAWN if len(held) == prod(sizes.values()) else FEW) else FEW
    high = len(rows) if len(rows) * wide <= 2 * DRAWN else FEW
    most = NUMBERS if wide <= 2 else NUMBERS // 2
    drawn = []
    for number, row in enumerate(rows[:high]):
        ats = [dict(zip(down, row, strict=True)) | dict.fromkeys(across, column) for column in range(wide)]
        devices = [held[tuple(at.get(dim, 0) for dim in range(rank))] for at in ats]
        drawn.append([
            Piece(number=number * columns + column if cut else -1, devices=each[:most], more=max(0, len(each) - most))
            for column, each in enumerate(devices)
        ])  # fmt: skip
    less = wide < columns or high < len(rows)
    return drawn, f"the first of {len(rows)} × {columns} pieces" if less else ""
