"""The mesh of a report, drawn as SVG without a script, and the colours of collectives."""

from collections.abc import Mapping, Sequence
from math import ceil, prod

from jaxpar.html.markup import Markup, tag
from jaxpar.mesh.axes import coordinates
from jaxpar.mesh.collective import KINDS

_CELLS = 64  # devices of a mesh that are drawn, if there are more


def kind_class(kind: str) -> str:
    """Returns the class that colours a kind of collective."""
    return f"jx-k{KINDS.index(kind)}" if kind in KINDS[:5] else "jx-other"


def mesh(sizes: Mapping[str, int], per_node: int, *, named: bool) -> Markup:
    """Returns the devices of a mesh, node by node, the first of them where there are many.

    Args:
      sizes: Axis to size, outermost first.
      per_node: Devices of a node.
      named: Whether nodes have a number.
    """
    count, shaded = prod(sizes.values()), shaded_axes(sizes)
    nodes = ceil(count / per_node)
    shown = min(nodes, max(1, _CELLS // per_node))
    drawn = [_node(number, range(number * per_node, min(count, (number + 1) * per_node)), sizes, shaded, named=named)
             for number in range(shown)]  # fmt: skip
    if nodes > shown:
        drawn.append(tag("p", f"and {nodes - shown} more node{'s' * (nodes - shown > 1)}", cls="jx-more"))
    return tag("div", *drawn, cls="jx-nodes")


def labelled_axes(sizes: Mapping[str, int]) -> list[str]:
    """Returns the axes whose coordinates are written on a device: those with several devices, the five largest."""
    large = sorted((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: -sizes[axis])[:5]
    return [axis for axis in sizes if axis in large]


def shaded_axes(sizes: Mapping[str, int]) -> list[str]:
    """Returns which axes colour a device, the one of the whole cell first: the largest that vary where it is drawn."""
    count = stride = prod(sizes.values())
    varying = []
    for axis, size in sizes.items():
        stride //= size
        if size > 1 and stride < min(_CELLS, count):
            varying.append(axis)
    return sorted(varying, key=lambda axis: -sizes[axis])[:2]


def _node(number: int, devices: range, sizes: Mapping[str, int], shaded: Sequence[str], *, named: bool) -> Markup:
    labelled = labelled_axes(sizes)
    longest = sum(len(str(sizes[axis] - 1)) + 1 for axis in labelled)
    width = max(42, 7 * longest + 10)
    columns = 8 if len(devices) > 8 and width < 60 else 4
    drawn = []
    for place, device in enumerate(devices[:_CELLS]):
        where = coordinates(device, sizes)
        label = "·".join(str(where[axis]) for axis in labelled) or str(device)
        title = f"device {device}: " + (", ".join(f"{axis} {at}" for axis, at in where.items()) or "alone")
        depths = [0.08 + 0.5 * where[axis] / (sizes[axis] - 1) for axis in shaded]
        move = f"translate({place % columns * (width + 4)} {place // columns * 38})"
        drawn.append(tag("g", tag("title", title), *_cell(width, depths, label), transform=move))
    wide, high = min(columns, len(devices)) * (width + 4) - 4, ceil(len(drawn) / columns) * 38 - 4
    name = f"node {number}" if named else "the mesh"
    picture = tag("svg", *drawn, viewBox=f"0 0 {wide} {high}", width=str(wide), role="img",
                  aria_label=f"{name}: {len(devices)} devices")  # fmt: skip
    left = len(devices) - len(drawn)
    more = [tag("p", f"and {left} more devices", cls="jx-more")] if left else []
    return tag("div", *([tag("div", name, cls="jx-small")] if named else []), picture, *more,
               cls="jx-node" if named else None)  # fmt: skip


def _cell(width: int, depths: Sequence[float], label: str) -> list[Markup]:
    """Returns one device: its first axis shades it, its second one the lower edge."""
    high = 34 if len(depths) < 2 else 27
    drawn = [tag("rect", width=str(width), height=str(high), rx="4", cls="jx-device",
                 fill_opacity=f"{(depths or [0.08])[0]:.2f}")]  # fmt: skip
    for depth in depths[1:]:
        edge = f"{depth + 0.2:.2f}"
        drawn.append(tag("rect", y="29", width=str(width), height="5", rx="2", cls="jx-edge", fill_opacity=edge))
    return [*drawn, tag("text", label, x=str(width // 2), y=str(high // 2 + 4), text_anchor="middle")]
