"""A layout as HTML for a notebook: its bytes, its devices and what joins them, and who holds what."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil, prod
from typing import Any

from jax.sharding import Mesh

from jaxpar.html.frame import in_ascii, style, tile
from jaxpar.html.markup import Markup, heading, join, tag
from jaxpar.html.pieces import axes_table, section
from jaxpar.mesh.axes import AXES, coordinates, nodes_of_axes
from jaxpar.mesh.chips import Chip, find_chip
from jaxpar.parallel.pages.who_holds import cards, cuts, listed
from jaxpar.parallel.placement import Placement
from jaxpar.sharding.shard_bytes import shard_bytes
from jaxpar.units import show_bytes, show_count

NODES = 4  # that are drawn, if there are more
CELLS = 16  # devices of a node that are drawn, if there are more
STAGES = (  # of ZeRO: what `fsdp` shards between steps, and what of it is sent in a step
    ("nothing: a copy of all on each", "gradients are summed: {grads}"),
    ("optimizer state and parameters", "gradients are summed, {grads}; parameters gathered once, {params}"),
    ("optimizer state, gradients, parameters", "gradients are summed, {grads}, each microbatch; parameters gathered "
     "once, {params}"),
    ("optimizer state, gradients, parameters", "parameters are gathered forward and backward, {params} each time; "
     "gradients summed once, {grads}"),
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shown:
    """What a page needs to know of a layout.

    Attributes:
      name: Of the model.
      sizes: Mesh axis to size, outermost first.
      placements: Path of a parameter to where it lives.
      others: The same of other state with dims.
      stage: Of ZeRO.
      mesh: Its devices, if there are any.
      simulated: Whether they are.
      said: Sentences: what was chosen, what is not split.
      agreement: How replicas that step apart agree; "" where gradients are summed.
      frozen: Paths of parameters that have no gradients.
    """

    name: str
    sizes: Mapping[str, int]
    placements: Mapping[str, Placement]
    others: Mapping[str, Placement]
    stage: int
    mesh: Mesh | None
    simulated: bool
    said: Sequence[str]
    agreement: str = ""
    frozen: frozenset[str] = frozenset()

    @property
    def trained(self) -> list[Placement]:
        """Where parameters with gradients live."""
        return [place for path, place in self.placements.items() if path not in self.frozen]

    @property
    def count(self) -> int:
        """Devices."""
        return prod(self.sizes.values())

    @property
    def chip(self) -> Chip | None:
        """The chip, if it is one of the table."""
        if self.mesh is None or self.simulated:
            return None
        return find_chip(self.mesh.devices.flat[0].device_kind)

    @property
    def per_node(self) -> int:
        """Devices of a node; of simulated ones all."""
        if self.mesh is None or self.simulated:
            return self.count
        nodes: dict[Any, int] = {}
        for device in self.mesh.devices.flat:
            nodes[device.process_index] = nodes.get(device.process_index, 0) + 1
        return max(nodes.values())


def fragment(shown: Shown) -> str:
    """Returns the layout as HTML for a notebook; its styles touch nothing else."""
    axes = " × ".join(f"{axis} {size}" for axis, size in shown.sizes.items() if size > 1) or "one device"
    stage = f", ZeRO-{shown.stage}" if shown.sizes["fsdp"] > 1 else ""
    said = [tag("p", each, cls="jx-small") for each in shown.said]
    return in_ascii(
        tag(
            "div", tag("style", Markup(style())),
            tag("div", f"{shown.name} on {axes}{stage}", cls="jx-title"),
            _tiles(shown), *said,
            heading("The devices, and what joins them"), _devices(shown), axes_table(links(shown)),
            heading("Who holds what between steps"),
            section(cards(shown.placements, shown.sizes)),
            listed({**shown.placements, **shown.others}, shown.sizes),
            cls="jaxpar jx-fragment",
        )
    )  # fmt: skip


def to_dict(shown: Shown) -> dict[str, Any]:
    """Returns the picture of a layout as JSON has it: its cards, and a row for each axis."""
    return {"cards": [asdict(card) for card in cards(shown.placements, shown.sizes)], "axes": links(shown)}


def _tiles(shown: Shown) -> Markup:
    leaves = [place.leaf for place in shown.placements.values()]
    whole, each = sum(leaf.bytes for leaf in leaves), _each(shown.placements, shown.sizes)
    share = f"{each / whole:.1%} of them" if whole else ""
    if other := _each(shown.others, shown.sizes):
        share += f"; {show_bytes(other)} of other state besides"
    devices = "simulated" if shown.simulated else shown.chip.name if shown.chip else "not there" * (shown.mesh is None)
    tiles = [
        ("Parameters", show_count(sum(leaf.size for leaf in leaves)), show_bytes(whole), "exact"),
        ("On each device", show_bytes(each), share, "exact"),
        ("Devices", f"{shown.count:,}", devices, "exact"),
    ]
    return tag("div", *[tile(*each) for each in tiles], cls="jx-tiles")


def _each(places: Mapping[str, Placement], sizes: Mapping[str, int]) -> int:
    return sum(place.per_device(sizes) for place in places.values())


def _devices(shown: Shown) -> Markup:
    """Returns the devices, node by node: the number of each, and its place on the axes."""
    nodes = ceil(shown.count / shown.per_node)
    drawn = [_node(shown, node, named=not shown.simulated and nodes > 1) for node in range(min(nodes, NODES))]
    more = [tag("p", f"and {nodes - NODES} more nodes", cls="jx-more")] if nodes > NODES else []
    large = [axis for axis, size in shown.sizes.items() if size > 1]
    key = f"A number is a device; below it is its place on {' · '.join(large)}." if large else ""
    return join([tag("p", key, cls="jx-small"), tag("div", *drawn, *more, cls="jx-nodes")])


def _node(shown: Shown, node: int, *, named: bool) -> Markup:
    large = [axis for axis, size in shown.sizes.items() if size > 1]
    first = node * shown.per_node
    last = min(first + shown.per_node, shown.count)
    cells = []
    for device in range(first, min(last, first + CELLS)):
        where = coordinates(device, shown.sizes)
        place = " · ".join(str(where[axis]) for axis in large)
        title = ", ".join(f"{axis} {where[axis]}" for axis in large)
        cells.append(tag("div", tag("b", str(device)), tag("span", place, cls="jx-small"), cls="jx-cell", title=title))
    left = last - first - CELLS
    more = [tag("p", f"and {left} more", cls="jx-more")] if left > 0 else []
    head = [tag("div", f"node {node}", cls="jx-small")] if named else []
    return tag("div", *head, tag("div", *cells, cls="jx-cells-of-a-node"), *more, cls="jx-node")


def links(shown: Shown) -> list[tuple[str, ...]]:
    """Returns for each axis its name and size, what its devices have, a group of them, what joins it, what it sends."""
    over = nodes_of_axes(shown.sizes, shown.per_node)
    return [
        (f"{axis} {size}", AXES[axis].meaning, _group(shown.sizes, axis), _link(shown, over[axis]), _sent(shown, axis))
        for axis, size in shown.sizes.items()
        if size > 1
    ]


def _group(sizes: Mapping[str, int], axis: str) -> str:
    """Returns the first devices that differ along one axis alone."""
    stride = prod([*sizes.values()][[*sizes].index(axis) + 1 :])
    numbers = [str(turn * stride) for turn in range(sizes[axis])]
    return ", ".join(numbers if len(numbers) <= 8 else [*numbers[:4], "...", numbers[-1]])


def _link(shown: Shown, nodes: int) -> str:
    if shown.mesh is None or shown.simulated:
        return "simulated" if shown.simulated else "not there"
    rate = None if shown.chip is None else shown.chip.nvlink if nodes == 1 else shown.chip.network
    speed = f", {rate / 1e9:.0f} GB/s" if rate else ""
    return ("inside a node" if nodes == 1 else f"over {nodes} nodes") + speed


def _sent(shown: Shown, axis: str) -> str:
    """Returns what goes along an axis: state, whose bytes the layout knows, or activations."""
    known, sizes = AXES[axis], shown.sizes
    if not known.examples:
        own = {name for place in shown.placements.values() for name in place.names}
        dims = ", ".join([name for name in known.splits if name in own] or known.splits)
        return f"activations; it splits {dims}" if dims else "activations"
    if not known.state and shown.agreement:
        return shown.agreement
    if not known.state:
        grads = sum(shard_bytes(place.leaf, place.sharded if shown.stage >= 2 else place.whole, sizes)
                    for place in shown.trained)  # fmt: skip
        return f"gradients are summed: {show_bytes(grads)} on each device"
    cut = [place for place in shown.placements.values() if any(axis in of_dim for of_dim in cuts(place, sizes)[0])]
    gathered = sum(shard_bytes(place.leaf, place.whole, sizes) for place in cut)
    grads = sum(shard_bytes(place.leaf, place.whole, sizes) for place in shown.trained)
    shards, sent = STAGES[shown.stage]
    return f"shards {shards}: " + sent.format(params=show_bytes(gathered), grads=show_bytes(grads))
