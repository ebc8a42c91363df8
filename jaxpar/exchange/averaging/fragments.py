"""Fragments of a model: which parameters, and which layers of stacks, meet together.

    depth    layers in a row: 0 1 2 | 3 4 5
    strided  every so many layers: 0 3 | 1 4 | 2 5

Parameters outside of layers, such as embeddings, go where least is so far, the largest first.
"""

import re
from collections.abc import Mapping, Sequence
from typing import Any

from jaxpar.errors import refuse
from jaxpar.exchange.part import Part

Fragment = Mapping[str, slice]  # path of a parameter to its layers in the fragment, all of dim 0 where it is no stack
ALL = slice(None)


def fragments(parts: Mapping[str, Part], count: int, order: str) -> Sequence[Fragment]:
    """Returns what each fragment has; together they have every parameter once.

    Args:
      parts: Path to shape.
      count: Fragments.
      order: depth, or strided.

    Raises:
      JaxparError: If one of them would be empty.
    """
    layer = {path: int(number[1]) for path in parts if (number := re.search(r"(?:^|/)(\d+)(?:/|$)", path))}
    listed = max(layer.values(), default=-1) + 1
    found: list[dict[str, slice]] = [{} for _ in range(count)]
    sizes = [0.0] * count
    others = []
    for path, part in parts.items():
        if part.layers and part.shape[0] >= count:
            for number in range(count):
                found[number][path] = _layers(part.shape[0], number, count, order)
                sizes[number] += part.size / count
        elif path in layer and listed >= count:
            number = layer[path] * count // listed if order == "depth" else layer[path] % count
            found[number][path] = ALL
            sizes[number] += part.size
        else:
            others.append(path)
    for path in sorted(others, key=lambda path: (-parts[path].size, path)):
        number = sizes.index(min(sizes))
        found[number][path] = ALL
        sizes[number] += parts[path].size
    if not all(found):
        raise refuse(
            f"fragments = {count} of a model of {len(parts)} parameters and {listed or 'no'} layers in a row",
            rule="every fragment has a layer or a parameter",
            fix=f"fragments = {max(sum(map(bool, found)), 1)}",
        )
    return found


def _layers(layers: int, number: int, count: int, order: str) -> slice:
    if order == "strided":
        return slice(number, None, count)
    return slice(number * layers // count, (number + 1) * layers // count)


def share(part: Part, layers: slice) -> Part:
    """Returns the shape of a fragment's layers of a parameter."""
    if layers == ALL:
        return part
    return Part((len(range(*layers.indices(part.shape[0]))), *part.shape[1:]), part.dtype, part.layers, part.whole)


def take(flat: Mapping[str, Any], fragment: Fragment, *, dim: int = 0) -> dict[str, Any]:
    """Returns the layers of a fragment, of arrays by path.

    Args:
      flat: Path to array.
      fragment: What it has.
      dim: Which dim is that of layers: 1 behind a dim of replicas.
    """
    return {path: flat[path][(ALL,) * dim + (layers,)] if layers != ALL else flat[path]
            for path, layers in fragment.items()}  # fmt: skip


def put(flat: Mapping[str, Any], fragment: Fragment, new: Mapping[str, Any], *, dim: int = 0) -> dict[str, Any]:
    """Returns arrays by path, with those layers of a fragment exchanged for new ones."""
    made = dict(flat)
    for path, layers in fragment.items():
        made[path] = flat[path].at[(ALL,) * dim + (layers,)].set(new[path]) if layers != ALL else new[path]
    return made
