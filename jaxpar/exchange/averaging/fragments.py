"""Fragments of a model: the parameters, and layers of stacks, that synchronize together.

    depth    consecutive layers: 0 1 2 | 3 4 5
    strided  every n-th layer: 0 3 | 1 4 | 2 5

Each parameter outside of the layers, such as an embedding, goes to the fragment that is smallest so far, in order of
decreasing size.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.errors import refuse
from jaxpar.mesh.collective import ShardShape

Fragment = Mapping[str, slice]  # parameter path -> the slice of its dim 0 (layers); all, if it is not a stack
ALL = slice(None)


def fragments(parts: Mapping[str, ShardShape], count: int, order: str) -> Sequence[Fragment]:
    """Divides a model into fragments, so that every parameter is in exactly one fragment.

    Args:
      parts: Shapes by path.
      count: Number of fragments.
      order: depth, or strided.

    Raises:
      JaxparError: If a fragment would be empty.
    """
    layer = {path: int(number[1]) for path in parts if (number := re.search(r"(?:^|/)(\d+)(?:/|$)", path))}
    listed = max(layer.values(), default=-1) + 1
    result: list[dict[str, slice]] = [{} for _ in range(count)]
    sizes = [0.0] * count
    outside = []
    for path, part in parts.items():
        if part.layers and part.shape[0] >= count:
            for number in range(count):
                result[number][path] = _layers(part.shape[0], number, count, order)
                sizes[number] += part.size / count
        elif path in layer and listed >= count:
            number = layer[path] * count // listed if order == "depth" else layer[path] % count
            result[number][path] = ALL
            sizes[number] += part.size
        else:
            outside.append(path)
    for path in sorted(outside, key=lambda path: (-parts[path].size, path)):
        number = sizes.index(min(sizes))
        result[number][path] = ALL
        sizes[number] += parts[path].size
    if not all(result):
        raise refuse(
            f"fragments = {count} of a model of {len(parts)} parameters and {listed or 'no'} numbered layers",
            rule="every fragment has a layer or a parameter",
            fix=f"fragments = {max(sum(map(bool, result)), 1)}",
        )
    return result


def _layers(layers: int, number: int, count: int, order: str) -> slice:
    if order == "strided":
        return slice(number, None, count)
    return slice(number * layers // count, (number + 1) * layers // count)


def share(part: ShardShape, layers: slice) -> ShardShape:
    """Returns the shape of a fragment's layers of a stacked parameter."""
    if layers == ALL:
        return part
    return ShardShape(
        (len(range(*layers.indices(part.shape[0]))), *part.shape[1:]), part.dtype, part.layers, part.total_size
    )


def take(flat: Mapping[str, Any], fragment: Fragment, *, dim: int = 0) -> dict[str, Any]:
    """Slices a fragment's layers from arrays.

    Args:
      flat: Arrays by path.
      fragment: The layers of the fragment, by path of the parameter.
      dim: The dim of layers: 1 if dim 0 is the replicas, else 0.
    """
    return {path: flat[path][(ALL,) * dim + (layers,)] if layers != ALL else flat[path]
            for path, layers in fragment.items()}  # fmt: skip


def put(flat: Mapping[str, Any], fragment: Fragment, new: Mapping[str, Any], *, dim: int = 0) -> dict[str, Any]:
    """Returns arrays by path, with a fragment's layers replaced."""
    result = dict(flat)
    for path, layers in fragment.items():
        result[path] = flat[path].at[(ALL,) * dim + (layers,)].set(new[path]) if layers != ALL else new[path]
    return result
