"""Drawings of a report, as SVG without a script: bars and the mesh.

Widths are percent of whatever room there is, so text keeps its size on a phone.
"""

from collections.abc import Mapping, Sequence
from math import ceil, prod

from jaxpar.inspector.markup import Markup, percent, tag, titled
from jaxpar.units import show_bytes

_CELLS = 64  # devices of a mesh that are drawn, if there are more
_MAGNIFIED = 0.15  # of the capacity: memory below is drawn once more


def bar(parts: Sequence[tuple[str, str, float]], scale: float, *, cls: str = "jx-bar") -> Markup:
    """Returns a stacked bar.

    Args:
      parts: (class, what it is, how much) from the left.
      scale: How much is the whole width.
      cls: Of the drawing.
    """
    scale, at, drawn = scale if scale > 0 else 1.0, 0.0, []
    for colour, what, size in parts:
        if size > 0:
            drawn.append(
                tag("rect", x=percent(at / scale), width=percent(size / scale), height="100%", cls=colour)
                if not what
                else titled(at / scale, size / scale, colour, what)
            )
            at += size
    return tag("svg", *drawn, cls=cls, aria_hidden="true")


def memory_bar(parts: Sequence[tuple[str, str, float]], total: float, capacity: float | None) -> Markup:
    """Returns memory by cause against a capacity, and magnified where it is a small part of that.

    Args:
      parts: (class, what it is, bytes).
      total: Bytes needed.
      capacity: Bytes there are; None where that is not known.
    """
    scale = max(total, capacity or 0, 1)
    stacked = bar(parts, scale, cls="jx-stack")
    if not capacity:
        return tag("div", stacked, cls="jx-memory")
    at = capacity / scale
    drawn = [_caption(at, f"{show_bytes(capacity)} for a program"), tag("div", stacked, _limit(at), cls="jx-limited")]
    if total < _MAGNIFIED * capacity:
        x = percent(total / scale)
        lines = [tag("line", x1="0", x2="0", y1="0", y2="100%"), tag("line", x1=x, x2="100%", y1="0", y2="100%")]
        drawn += [tag("svg", *lines, cls="jx-zoom", aria_hidden="true"), bar(parts, total, cls="jx-stack"),
                  _caption(1.0, f"{show_bytes(total)}, magnified")]  # fmt: skip
    return tag("div", *drawn, cls="jx-memory")


def _limit(at: float) -> Markup:
    """Returns the mark of a capacity over a bar."""
    marks = [tag("line", x1=percent(at), x2=percent(at), y1="0", y2="100%", cls="jx-limit")]
    if at < 1:
        marks.insert(0, tag("rect", x=percent(at), width=percent(1 - at), y="0", height="100%", cls="jx-beyond"))
    return tag("svg", *marks, cls="jx-stack jx-marks", aria_hidden="true")


def _caption(at: float, words: str) -> Markup:
    label = tag("text", words, x=percent(at), y="12", text_anchor="end" if at > 0.5 else "start")
    return tag("svg", label, cls="jx-axis", aria_hidden="true")


def coordinates(device: int, sizes: Mapping[str, int]) -> dict[str, int]:
    """Returns where a device is in a mesh, by its number in it.

    >>> coordinates(5, {"data": 2, "tensor": 4})
    {'data': 1, 'tensor': 1}
    """
    found = {}
    for axis, size in reversed(list(sizes.items())):
        device, found[axis] = divmod(device, size)
    return {axis: found[axis] for axis in sizes}


def nodes_of_axes(sizes: Mapping[str, int], per_node: int) -> dict[str, int]:
    """Returns over how many nodes one group of each axis goes, at most.

    >>> nodes_of_axes({"data": 2, "fsdp": 4, "tensor": 4}, per_node=8)
    {'data': 2, 'fsdp': 2, 'tensor': 1}
    """
    count = stride = prod(sizes.values())
    found = {}
    for axis, size in sizes.items():
        stride //= size
        firsts = (device for device in range(count) if device // stride % size == 0)
        found[axis] = max(len({(first + turn * stride) // per_node for turn in range(size)}) for first in firsts)
    return found


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
