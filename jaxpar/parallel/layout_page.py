"""Renders a layout as HTML for a notebook: its bytes, its devices and their links, and the shards on each device."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

from jax.sharding import Mesh

from jaxpar.html.charts import axes_table, section
from jaxpar.html.markup import Markup, heading, in_ascii, join, style, tag, tile
from jaxpar.mesh.axes import AXES, coordinates, nodes_of_axes
from jaxpar.mesh.chips import Chip, find_chip
from jaxpar.parallel.placement import Placement
from jaxpar.parallel.shard_cards import cards, image_card, parameter_table, split_axes
from jaxpar.sharding.names import shard_bytes
from jaxpar.units import show_bytes, show_count

NODES = 4  # most nodes that are drawn
CELLS = 16  # most devices of a node that are drawn
STAGES = (  # per ZeRO stage: the arrays that `fsdp` shards between steps, and the collectives of a step
    ("nothing: a copy of all on each", "gradients are summed: {grads}"),
    ("optimizer state and parameters", "gradients are summed, {grads}; parameters gathered once, {params}"),
    ("optimizer state, gradients, parameters", "gradients are summed, {grads}, each microbatch; parameters gathered "
     "once, {params}"),
    ("optimizer state, gradients, parameters", "parameters are gathered forward and backward, {params} each time; "
     "gradients summed once, {grads}"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class LayoutPage:
    """The data of a layout's page.

    Attributes:
      name: Name of the model.
      sizes: Mesh axis to size, outermost first.
      placements: Path of a parameter to its placement.
      others: Path of other state with dims to its placement.
      stage: ZeRO stage.
      mesh: The mesh, or None without devices.
      simulated: Whether the devices are simulated.
      notes: Notes on choices, and on parameters that no axis splits.
      sync_note: A sentence about the synchronization of per-replica steps; "" if XLA sums gradients.
      frozen: Paths of parameters without gradients.
    """

    name: str
    sizes: Mapping[str, int]
    placements: Mapping[str, Placement]
    others: Mapping[str, Placement]
    stage: int
    mesh: Mesh | None
    simulated: bool
    notes: Sequence[str]
    sync_note: str = ""
    frozen: frozenset[str] = frozenset()

    @property
    def trained(self) -> list[Placement]:
        """Placements of the parameters with gradients."""
        return [place for path, place in self.placements.items() if path not in self.frozen]

    @property
    def count(self) -> int:
        """Number of devices."""
        return prod(self.sizes.values())

    @property
    def chip(self) -> Chip | None:
        """The chip, if `jaxpar.mesh.chips` lists it."""
        if self.mesh is None or self.simulated:
            return None
        return find_chip(self.mesh.devices.flat[0].device_kind)

    @property
    def per_node(self) -> int:
        """Number of devices per node; all devices if they are simulated or absent."""
        if self.mesh is None or self.simulated:
            return self.count
        nodes: dict[Any, int] = {}
        for device in self.mesh.devices.flat:
            nodes[device.process_index] = nodes.get(device.process_index, 0) + 1
        return max(nodes.values())


def fragment(shown: LayoutPage) -> str:
    """Renders the layout as HTML for a notebook; its styles apply only to this HTML."""
    axes = " × ".join(f"{axis} {size}" for axis, size in shown.sizes.items() if size > 1) or "one device"
    stage = f", ZeRO-{shown.stage}" if shown.sizes["fsdp"] > 1 else ""
    paragraphs = [tag("p", sentence, cls="jx-small") for sentence in shown.notes]
    images = image_card(shown.sizes)
    pieces = [heading("Who holds which piece of an image in a step"), section([images])] if images else []
    return in_ascii(
        tag(
            "div", tag("style", Markup(style())),
            tag("div", f"{shown.name} on {axes}{stage}", cls="jx-title"),
            _tiles(shown), *paragraphs,
            heading("The devices, and what joins them"), _devices(shown), axes_table(links(shown)),
            *pieces,
            heading("Who holds what between steps"),
            section(cards(shown.placements, shown.sizes)),
            parameter_table({**shown.placements, **shown.others}, shown.sizes),
            cls="jaxpar jx-fragment",
        )
    )  # fmt: skip


def to_dict(shown: LayoutPage) -> dict[str, Any]:
    """Returns the content of the HTML as JSON data: its cards, and a row per axis."""
    return {"cards": [asdict(card) for card in cards(shown.placements, shown.sizes)], "axes": links(shown)}


def _tiles(shown: LayoutPage) -> Markup:
    leaves = [place.leaf for place in shown.placements.values()]
    whole, each = sum(leaf.bytes for leaf in leaves), _bytes_per_device(shown.placements, shown.sizes)
    share = f"{each / whole:.1%} of them" if whole else ""
    if other := _bytes_per_device(shown.others, shown.sizes):
        share += f"; {show_bytes(other)} of other state besides"
    devices = "simulated" if shown.simulated else shown.chip.name if shown.chip else "not there" * (shown.mesh is None)
    tiles = [
        ("Parameters", show_count(sum(leaf.size for leaf in leaves)), show_bytes(whole), "exact"),
        ("On each device", show_bytes(each), share, "exact"),
        ("Devices", f"{shown.count:,}", devices, "exact"),
    ]
    return tag("div", *[tile(*each) for each in tiles], cls="jx-tiles")


def _bytes_per_device(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> int:
    return sum(place.per_device(sizes) for place in places.values())


def _devices(shown: LayoutPage) -> Markup:
    nodes = ceil(shown.count / shown.per_node)
    drawn = [_node(shown, node, named=not shown.simulated and nodes > 1) for node in range(min(nodes, NODES))]
    more = [tag("p", f"and {nodes - NODES} more nodes", cls="jx-more")] if nodes > NODES else []
    large = [axis for axis, size in shown.sizes.items() if size > 1]
    key = f"A number is a device; below it is its place on {' · '.join(large)}." if large else ""
    return join([tag("p", key, cls="jx-small"), tag("div", *drawn, *more, cls="jx-nodes")])


def _node(shown: LayoutPage, node: int, *, named: bool) -> Markup:
    large = [axis for axis, size in shown.sizes.items() if size > 1]
    first = node * shown.per_node
    last = min(first + shown.per_node, shown.count)
    cells, widest = [], 0
    for device in range(first, min(last, first + CELLS)):
        coords = coordinates(device, shown.sizes)
        place = " · ".join(str(coords[axis]) for axis in large)
        title = ", ".join(f"{axis} {coords[axis]}" for axis in large)
        widest = max(widest, len(place))
        cells.append(tag("div", tag("b", str(device)), tag("span", place, cls="jx-small"), cls="jx-cell", title=title))
    remaining = last - first - CELLS
    more = [tag("p", f"and {remaining} more", cls="jx-more")] if remaining > 0 else []
    head = [tag("div", f"node {node}", cls="jx-small")] if named else []
    grid = tag("div", *cells, cls="jx-cells-of-a-node", style=f"--place: {widest}ch")
    return tag("div", *head, grid, *more, cls="jx-node")


def links(shown: LayoutPage) -> list[tuple[str, ...]]:
    """Returns a row per axis: name and size, meaning, a group of devices along it, their link, their traffic."""
    over = nodes_of_axes(shown.sizes, shown.per_node)
    return [
        (
            f"{axis} {size}",
            AXES[axis].meaning,
            _group(shown.sizes, axis),
            _link(shown, over[axis]),
            _describe_traffic(shown, axis),
        )
        for axis, size in shown.sizes.items()
        if size > 1
    ]


def _group(sizes: Mapping[str, int], axis: str) -> str:
    """Returns the group of devices along one axis that contains the first device."""
    stride = prod([*sizes.values()][[*sizes].index(axis) + 1 :])
    numbers = [str(index * stride) for index in range(sizes[axis])]
    return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:4], "...", numbers[-1]])


def _link(shown: LayoutPage, nodes: int) -> str:
    if shown.mesh is None or shown.simulated:
        return "simulated" if shown.simulated else "not there"
    rate = None if shown.chip is None else shown.chip.nvlink if nodes == 1 else shown.chip.network
    speed = f", {rate / 1e9:.0f} GB/s" if rate else ""
    return ("inside a node" if nodes == 1 else f"over {nodes} nodes") + speed


def _describe_traffic(shown: LayoutPage, axis: str) -> str:
    """Describes the arrays that devices send along an axis: state, with its bytes, or activations."""
    info, sizes = AXES[axis], shown.sizes
    if not info.splits_batch:
        dim_names = {name for place in shown.placements.values() for name in place.names}
        dims = ", ".join([name for name in info.splits if name in dim_names] or info.splits)
        return f"activations; it splits {dims}" if dims else "activations"
    if not info.shards_state and shown.sync_note:
        return shown.sync_note
    if not info.shards_state:
        grads = sum(shard_bytes(place.leaf, place.sharded if shown.stage >= 2 else place.whole, sizes)
                    for place in shown.trained)  # fmt: skip
        return f"gradients are summed: {show_bytes(grads)} on each device"
    places = [
        place for place in shown.placements.values() if any(axis in names for names in split_axes(place, sizes)[0])
    ]
    gathered = sum(shard_bytes(place.leaf, place.whole, sizes) for place in places)
    grads = sum(shard_bytes(place.leaf, place.whole, sizes) for place in shown.trained)
    shards, traffic = STAGES[shown.stage]
    return f"shards {shards}: " + traffic.format(params=show_bytes(gathered), grads=show_bytes(grads))
