"""Draws the shards on each device of a mesh: for each placement, one parameter with that placement, cut into shards.

    position of a device ──► its coordinate on each axis ──► its index along each dim that these axes split

A shard is drawn at its place in the array, with the numbers of the devices that hold it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import product
from math import prod

import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.html.charts import Card, Shard
from jaxpar.html.markup import Markup, table, tag
from jaxpar.mesh.axes import batch_axes, coordinates
from jaxpar.models.dim_names import SPATIAL
from jaxpar.parallel.placement import Placement
from jaxpar.sharding.names import Leaf, shard_counts
from jaxpar.units import show_bytes

DRAWN, FEW = 8, 4  # shards drawn side by side: up to eight, or four if there are more or each is wide
NUMBERS = 8  # most devices of a shard that are numbered in a card that is two shards wide; half of them in a wider one


@dataclass(frozen=True, kw_only=True)
class Group:
    """Parameters with the same placement.

    Attributes:
      places: Path of each parameter to its placement, largest parameter first.
    """

    places: Mapping[str, Placement]

    @property
    def bytes(self) -> int:
        """Bytes of all these parameters, unsharded."""
        return sum(place.leaf.bytes for place in self.places.values())


def groups(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> list[Group]:
    """Groups parameters by the axes that split their dims, in order of dims; the group with the most bytes is first."""
    table: dict[tuple, dict[str, Placement]] = {}
    for path, place in places.items():
        table.setdefault(tuple(split_axes(place, sizes)[0]), {})[path] = place
    sort = {key: dict(sorted(params.items(), key=lambda item: -item[1].leaf.bytes)) for key, params in table.items()}
    return sorted((Group(places=params) for params in sort.values()), key=lambda group: -group.bytes)


def split_axes(place: Placement, sizes: Mapping[str, int]) -> tuple[list[tuple[str, ...]], list[int]]:
    """Returns the axes of each split dim, outermost first, and the indices of these dims."""
    axes, dims = [], []
    for dim, entry in enumerate(place.stored):
        dim_axes = (entry,) if isinstance(entry, str) else tuple(entry or ())
        if large := tuple(axis for axis in dim_axes if sizes[axis] > 1):
            axes.append(large)
            dims.append(dim)
    return axes, dims


def shard_devices(spec: PartitionSpec, rank: int, sizes: Mapping[str, int]) -> dict[tuple[int, ...], list[int]]:
    """Maps each shard, by its index along every dim, to the mesh positions of the devices that hold it.

    >>> shard_devices(PartitionSpec("fsdp"), 1, {"data": 2, "fsdp": 2})
    {(0,): [0, 2], (1,): [1, 3]}
    """
    entries = (*spec, *(None,) * (rank - len(spec)))
    axes = [(entry,) if isinstance(entry, str) else tuple(entry or ()) for entry in entries]
    devices: dict[tuple[int, ...], list[int]] = {}
    for device in range(prod(sizes.values())):
        coords = coordinates(device, sizes)
        piece = []
        for dim_axes in axes:
            index = 0
            for axis in dim_axes:
                index = index * sizes[axis] + coords[axis]
            piece.append(index)
        devices.setdefault(tuple(piece), []).append(device)
    return devices


def cards(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> list[Card]:
    """Returns a card per group, which shows its largest parameter."""
    return [_card(group, sizes) for group in groups(places, sizes)]


def image_card(sizes: Mapping[str, int]) -> Card | None:
    """Returns a card of the images of a batch, and the devices that hold each piece; None if no axis splits images."""
    names = ("batch", *SPATIAL)
    axes = [batch_axes(sizes), *((name,) if name in sizes else () for name in SPATIAL)]
    spec = PartitionSpec(*(tuple(axis for axis in dim if sizes[axis] > 1) or None for dim in axes))
    if not any(spec[1:]):
        return None
    leaf = Leaf(shape=shard_counts(spec, len(names), sizes), dtype=jnp.float32, names=names)
    place = Placement(leaf=leaf, names=names, stored=spec, used=spec, whole=spec, sharded=spec, why="")
    rows, less = _rows(place, sizes)
    return Card(
        name="images", more=0, placed=f"[{place.describe(sizes).partition('[')[2]}", shape=" × ".join(names),
        kept="neighbours exchange the rows at the borders of their pieces", rows=rows, less=less,
    )  # fmt: skip


def parameter_table(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> Markup:
    """Returns a table of all parameters: placement, bytes per device, and the rule that chose the placement."""
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
    shape, whole, per_device = place.leaf.shape, place.leaf.bytes, place.per_device(sizes)
    count = prod(shard_counts(place.stored, len(shape), sizes))
    rows, less = _rows(place, sizes)
    size_text = f"{show_bytes(whole)} in {count} pieces; {show_bytes(per_device)} on each device"
    return Card(
        name=path, more=len(group.places) - 1, placed=place.describe(sizes),
        shape="×".join(map(str, shape)) or "scalar",
        kept=size_text if count > 1 else f"{show_bytes(whole)}, whole on each device", rows=rows, less=less,
    )  # fmt: skip


def _rows(place: Placement, sizes: Mapping[str, int]) -> tuple[list[list[Shard]], str]:
    """Returns the shards to draw, and a note if these are not all shards.

    The last split dim runs to the right, earlier split dims run downwards.
    """
    rank = len(place.leaf.shape)
    counts, holders_of = shard_counts(place.stored, rank, sizes), shard_devices(place.stored, rank, sizes)
    cut = [dim for dim, count in enumerate(counts) if count > 1]
    across = cut[-1:] if cut and (len(cut) > 1 or cut[-1] == rank - 1) else []
    down = [dim for dim in cut if dim not in across]
    columns = prod(counts[dim] for dim in across)
    rows = list(product(*(range(counts[dim]) for dim in down)))
    wide = columns if columns <= (DRAWN if len(holders_of) == prod(sizes.values()) else FEW) else FEW
    high = len(rows) if len(rows) * wide <= 2 * DRAWN else FEW
    most = NUMBERS if wide <= 2 else NUMBERS // 2
    drawn = []
    for number, row in enumerate(rows[:high]):
        positions = [dict(zip(down, row, strict=True)) | dict.fromkeys(across, column) for column in range(wide)]
        devices = [holders_of[tuple(position.get(dim, 0) for dim in range(rank))] for position in positions]
        drawn.append([
            Shard(number=number * columns + column if cut else -1, devices=ids[:most], more=max(0, len(ids) - most))
            for column, ids in enumerate(devices)
        ])  # fmt: skip
    incomplete = wide < columns or high < len(rows)
    return drawn, f"the first of {len(rows)} × {columns} pieces" if incomplete else ""
