"""Parses replica groups, the devices of a collective, and finds the mesh axes that they form.

XLA prints groups in three forms:

    {{0,1},{2,3}}                           groups of unequal sizes in this form alone, {{0,1,2},{3}}
    [2,4]<=[4,2]T(1,0)                      an iota, reshaped and transposed
    mesh['a'=4,'b'=2], device_ids=([2,4]T(1,0)) {'b'}    axes of XLA's own, 'b':(1)2 a part of one;
                                            the ids may also be listed, device_ids=(0,2,1,3)
"""

import math
import re
from collections.abc import Mapping

import numpy as np

from jaxpar.errors import JaxparError, refuse

_LIST = re.compile(r"\{\{[\d,\s]+\}(?:,\s*\{[\d,\s]+\})*\}")
_PAIRS = re.compile(r"\{(?:\{\d{1,9},\s*\d{1,9}\}(?:,\s*(?=\{))?)*\}")
_MESH = re.compile(
    r"mesh\[((?:'[^']+'=\d+,?)*)\](?:,\s*device_ids=\((?:\[([\d,]+)\](?:T\(([\d,]+)\))?|([\d,]+))\))?"
    r"\s*\{((?:'[^']+'(?::\(\d+\)\d+)?,?\s*)*)\}"
)


def parse_groups(text: str, devices: int) -> np.ndarray:
    """Returns the device ids of each group, where a smaller one repeats its first. Shape [groups, size of the largest].

    Args:
      text: The text after `replica_groups=`.
      devices: Number of devices of the program; `{}` is one group of all devices.

    Raises:
      JaxparError: If the text has none of the three forms, or its ids do not fit the devices.
    """
    text = text.strip()
    try:
        if text.startswith("mesh"):
            groups = _mesh_form(text, devices)
        elif text.startswith("["):
            groups = _iota_form(text, devices)
        elif text == "{}":
            groups = np.arange(devices)[None]
        elif _LIST.fullmatch(text):
            groups = _list_form(text)
        else:
            raise ValueError(text[:40])
    except (ValueError, KeyError, IndexError, TypeError, ZeroDivisionError) as error:
        raise _refusal(text) from error
    # groups of one collective share no device: a duplicate id means that the text was misread
    if groups.ndim != 2 or groups.size == 0 or groups.max() >= devices:
        raise _refusal(text)
    if len(np.unique(groups)) < group_sizes(groups).sum():
        raise _refusal(text)
    return groups


def group_sizes(groups: np.ndarray) -> np.ndarray:
    """Returns the number of devices of each group. Shape [groups].

    >>> group_sizes(parse_groups("{{0,1,2},{3}}", devices=4))
    array([3, 1])
    """
    repeats = (groups[:, 1:] == groups[:, :1]).sum(axis=1)
    return groups.shape[1] - repeats


def equal_groups(groups: np.ndarray) -> list[np.ndarray]:
    """Returns the groups of each size, the largest first. Each of shape [groups, size]."""
    sizes = group_sizes(groups)
    return [groups[sizes == size, :size] for size in sorted({*sizes.tolist()}, reverse=True)]


def _list_form(text: str) -> np.ndarray:
    groups = [[int(x) for x in row.split(",")] for row in re.findall(r"\{([^{}]+)\}", text)]
    if any(len({*group}) < len(group) for group in groups):
        raise ValueError(text[:40])
    most = max(map(len, groups))
    return np.array([group + group[:1] * (most - len(group)) for group in groups])


def _refusal(text: str) -> JaxparError:
    return refuse(
        f"replica_groups={text[:80]}",
        rule="replica groups are {{0,1},{2,3}}, an iota [2,4]<=[8] or axes of a mesh, and name devices of the program",
        fix="a text that XLA printed; if it is one, a newer jaxpar",
    )


def _ids(shape: list[int], devices: int) -> np.ndarray:
    if math.prod(shape) > devices:
        raise ValueError(f"more than {devices} devices")
    return np.arange(math.prod(shape)).reshape(shape)


def _iota(dims: str, reshape: str, transpose: str | None, devices: int) -> np.ndarray:
    ids = _ids([int(x) for x in reshape.split(",")], devices)
    if transpose:
        ids = ids.transpose([int(x) for x in transpose.split(",")])
    return ids.reshape([int(x) for x in dims.split(",")])


def _iota_form(text: str, devices: int) -> np.ndarray:
    match = re.fullmatch(r"\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?", text)
    if not match:
        raise ValueError(text)
    return _iota(match[1], match[2], match[3], devices)


def _mesh_form(text: str, devices: int) -> np.ndarray:
    match = _MESH.fullmatch(text)
    if not match:
        raise ValueError(text)
    sizes = {name: int(size) for name, size in re.findall(r"'([^']+)'=(\d+)", match[1])}
    shape = list(sizes.values())
    if match[2]:
        ids = _iota(",".join(map(str, shape)), match[2], match[3], devices)
    elif match[4]:
        ids = np.array([int(x) for x in match[4].split(",")])
        if len(np.unique(ids)) < ids.size:
            raise ValueError(text[:40])
    else:
        ids = _ids(shape, devices)
    # split each axis at its named parts, then move the named parts to the end. 'b':(2)4 is the part of b that has 4
    # entries and 2 before it: b is reshaped to [2, 4, the rest]
    axis_parts: dict[str, list[tuple[int, int]]] = {}
    order: list[tuple[str, int]] = []
    for name, stride, size in re.findall(r"'([^']+)'(?::\((\d+)\)(\d+))?", match[5]):
        part = (int(stride), int(size)) if stride else (1, sizes[name])
        axis_parts.setdefault(name, []).append(part)
        order.append((name, part[0]))
    pieces: list[tuple[tuple[str, int], int, bool]] = []
    for name, size in sizes.items():
        covered = 1
        for stride, part in sorted(axis_parts.get(name, [])):
            if stride > covered:
                pieces.append(((name, covered), stride // covered, False))
            pieces.append(((name, stride), part, True))
            covered = stride * part
        if covered < size:
            pieces.append(((name, covered), size // covered, False))
    grid = ids.reshape([size for _, size, _ in pieces])
    keys = [key for key, _, _ in pieces]
    group_dims = [keys.index(key) for key in order]
    batch_dims = [index for index, (_, _, is_group) in enumerate(pieces) if not is_group]
    width = int(np.prod([pieces[index][1] for index in group_dims]))
    return grid.transpose(batch_dims + group_dims).reshape(-1, width)


def axes_of_groups(groups: np.ndarray, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which the members of each group differ.

    Args:
      groups: As `parse_groups` returns them. Partition i is the i-th device of the mesh.
      sizes: Mesh axis to size, outermost first.

    Returns:
      Names of axes; `~name` if a group contains only a part of an axis, or mixes several axes unevenly.

    Raises:
      JaxparError: If the program runs on more devices than the mesh has.
    """
    _check_mesh(groups, sizes)
    axes = [axis for axis, size in sizes.items() if size > 1]
    if not axes:
        return ()
    shape = [sizes[axis] for axis in axes]
    coordinates = np.stack(np.unravel_index(groups, shape))  # [axes, groups, size]
    # a group spans an axis if its members differ in that coordinate, and takes all of the axes that it spans if its
    # size is their product
    varies = (coordinates != coordinates[:, :, :1]).any(axis=(1, 2))
    spanned = [axis for axis, differs in zip(axes, varies, strict=True) if differs]
    product = int(np.prod([sizes[axis] for axis in spanned]))
    is_whole = (group_sizes(groups) == product).all()
    return tuple(spanned) if is_whole else tuple(f"~{axis}" for axis in spanned)


def _check_mesh(ids: np.ndarray, sizes: Mapping[str, int]) -> None:
    if ids.max(initial=0) >= math.prod(sizes.values()):
        raise refuse(
            f"a collective with device {ids.max()} on a mesh {' x '.join(f'{a}={n}' for a, n in sizes.items())}",
            rule="the mesh has as many devices as the program was compiled for",
            fix="jp.inspect(f, ..., mesh=that mesh), or arguments with shardings",
        )


def parse_pairs(text: str, devices: int) -> np.ndarray:
    """Returns the (source, target) pairs of a permute; none if a pipeline has one stage. Shape [pairs, 2].

    Raises:
      JaxparError: If the text is not a list of pairs, or has devices that the program does not have.
    """
    ids = [int(x) for x in re.findall(r"\d+", text)] if _PAIRS.fullmatch(text) else [devices]
    if max(ids, default=0) >= devices:
        raise refuse(
            f"source_target_pairs={text[:80]}",
            rule="pairs are {{0,1},{1,2}}, and name devices of the program",
            fix="a text that XLA printed",
        )
    return np.array(ids, int).reshape(-1, 2)


def axes_of_pairs(pairs: np.ndarray, sizes: Mapping[str, int]) -> tuple[str, ...]:
    """Returns the mesh axes along which a permute sends.

    Raises:
      JaxparError: If the program runs on more devices than the mesh has.
    """
    _check_mesh(pairs, sizes)
    axes = [axis for axis, size in sizes.items() if size > 1]
    if not axes:
        return ()
    coordinates = np.stack(np.unravel_index(pairs, [sizes[axis] for axis in axes]))
    return tuple(axis for axis, (a, b) in zip(axes, coordinates.transpose(0, 2, 1), strict=True) if (a != b).any())


def most_nodes(groups: np.ndarray, per_node: int) -> int:
    """Returns the number of nodes of the group that spans the most nodes; at least 1.

    Args:
      groups: Device ids, numbered node by node: the groups of a collective, or the pairs of a permute. Shape [groups,
        size].
      per_node: Number of devices per node.

    >>> most_nodes(np.array([[0, 4], [4, 8]]), per_node=8)
    2
    """
    nodes = np.sort(groups // per_node, axis=1)
    return 1 + int((np.diff(nodes, axis=1) > 0).sum(axis=1).max(initial=0))


def attribute_text(attributes: str, key: str) -> str:
    """Returns the text after `key=`, up to the next comma outside of brackets, except that of `, device_ids=`."""
    start = attributes.find(f"{key}=")
    if start < 0:
        return "{}"
    text = attributes[start + len(key) + 1 :]
    depth = 0
    for index, char in enumerate(text):
        depth += (char in "{[(") - (char in "}])")
        if char == "," and depth == 0 and not text.startswith(", device_ids=", index):
            return text[:index]
    return text
