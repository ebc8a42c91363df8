"""The mesh of a report, drawn as SVG without a script, and the colours of collectives."""

from collections.abc import Mapping, Sequence
from math import ceil, prod

from jaxpar.html.markup import Markup, tag
from jaxpar.mesh.axes import coordinates
from jaxpar.mesh.collective import KINDS

_CELLS = 64  # maximum number of devices drawn


def kind_class(kind: str) -> str:
    """The CSS class of a kind of collective."""
    return f"jx-k{KINDS.index(kind)}" if kind in KINDS[:5] else "jx-other"


def mesh(sizes: Mapping[str, int], per_node: int, *, named: bool) -> Markup:
    """Draws the devices of a mesh node by node; only the first nodes of a large mesh.

    Args:
      sizes: Sizes of the axes by name, outermost first.
      per_node: Devices per node.
      named: Whether to label nodes with their numbers.
    """
    count, shades = prod(sizes.values()), shaded_axes(sizes)
    nodes = ceil(count / per_node)
    visible = min(nodes, max(1, _CELLS // per_node))
    parts = [_node(number, range(number * per_node, min(count, (number + 1) * per_node)), sizes, shades, named=named)
             for number in range(visible)]  # fmt: skip
    if nodes > visible:
        parts.append(tag("p", f"and {nodes - visible} more node{'s' * (nodes - visible > 1)}", cls="jx-more"))
    return tag("div", *parts, cls="jx-nodes")


def labelled_axes(sizes: Mapping[str, int]) -> list[str]:
    """The axes whose coordinates are written on a device: the five largest of those with several devices."""
    large = sorted((axis for axis in sizes if sizes[axis] > 1), key=lambda axis: -sizes[axis])[:5]
    return [axis for axis in sizes if axis in large]


def shaded_axes(sizes: Mapping[str, int]) -> list[str]:
    """Returns the two largest axes that vary among drawn devices: one shades the cell, one the cell's lower edge."""
    count = stride = prod(sizes.values())
    varying = []
    for axis, size in sizes.items():
        stride //= size
        if size > 1 and stride < min(_CELLS, count):
            varying.append(axis)
    return sorted(varying, key=lambda axis: -sizes[axis])[:2]


def _node(number: int, devices: range, sizes: Mapping[str, int], shaded: Sequence[str], *, named: bool) -> Markup:
    label_axes = labelled_axes(sizes)
    longest = sum(len(str(sizes[axis] - 1)) + 1 for axis in label_axes)
    width = max(42, 7 * longest + 10)
    columns = 8 if len(devices) > 8 and width < 60 else 4
    cells = []
    for place, device in enumerate(devices[:_CELLS]):
        position = coordinates(device, sizes)
        label = "·".join(str(position[axis]) for axis in label_axes) or str(device)
        title = f"device {device}: " + (", ".join(f"{axis} {index}" for axis, index in position.items()) or "alone")
        depths = [0.08 + 0.5 * position[axis] / (sizes[axis] - 1) for axis in shaded]
        move = f"translate({place % columns * (width + 4)} {place // columns * 38})"
        cells.append(tag("g", tag("title", title), *_cell(width, depths, label), transform=move))
    total_width, total_height = min(columns, len(devices)) * (width + 4) - 4, ceil(len(cells) / columns) * 38 - 4
    name = f"node {number}" if named else "the mesh"
    picture = tag("svg", *cells, viewBox=f"0 0 {total_width} {total_height}", width=str(total_width), role="img",
                  aria_label=f"{name}: {len(devices)} devices")  # fmt: skip
    hidden = len(devices) - len(cells)
    overflow_note = [tag("p", f"and {hidden} more devices", cls="jx-more")] if hidden else []
    return tag("div", *([tag("div", name, cls="jx-small")] if named else []), picture, *overflow_note,
               cls="jx-node" if named else None)  # fmt: skip


def _cell(width: int, depths: Sequence[float], label: str) -> list[Markup]:
    """Draws one device: its index on the first axis shades the cell, that on the second axis the lower edge."""
    height = 34 if len(depths) < 2 else 27
    shapes = [tag("rect", width=str(width), height=str(height), rx="4", cls="jx-device",
                  fill_opacity=f"{(depths or [0.08])[0]:.2f}")]  # fmt: skip
    for depth in depths[1:]:
        edge = f"{depth + 0.2:.2f}"
        shapes.append(tag("rect", y="29", width=str(width), height="5", rx="2", cls="jx-edge", fill_opacity=edge))
    return [*shapes, tag("text", label, x=str(width // 2), y=str(height // 2 + 4), text_anchor="middle")]
