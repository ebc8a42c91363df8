"""Lists of equal layers, found by the names and shapes of their parameters.

    blocks/0/attn/kernel   [64, 64]
    blocks/1/attn/kernel   [64, 64]      equal neighbours: a list of layers, whose stack is called
    blocks/2/attn/kernel   [64, 64]      blocks/*/attn/kernel [3, 64, 64]

`h_0`, `h_1`, ... of Linen likewise: `h_*`; and any other word that ends with a number, `block1` or `blocks.0`. A
pipeline runs a list as a stack; each parameter keeps its own name, so that a checkpoint knows nothing of it.
"""

import re
from collections.abc import Iterable, Mapping

from jaxpar.sharding.names import Leaf

Lists = dict[str, tuple[str, ...]]  # path of a parameter of the stack to those of the layers, in order


def longest_list(leaves: Mapping[str, Leaf], parts: int) -> Lists:
    """Returns the equal layers that have the most parameters, as a stack: nothing where there are none.

    Args:
      leaves: All parameters of a model, by path.
      parts: Divides the number of layers.
    """
    found = (run for layers in _numbered(leaves).values() for run in _runs(layers, leaves) if len(run) % parts == 0)
    best = max(found, key=lambda run: size_of(leaves, (path for layer in run for path in layer.values())), default=[])
    if not best:
        return {}
    return {stack: tuple(layer[stack] for layer in best) for stack in best[0]}


def size_of(leaves: Mapping[str, Leaf], paths: Iterable[str]) -> int:
    """Returns the bytes of these parameters."""
    return sum(leaves[path].bytes for path in paths)


def _numbered(leaves: Mapping[str, Leaf]) -> dict[str, dict[int, dict[str, str]]]:
    """Returns what begins with a path and a number: path to number to parameter of the stack to parameter."""
    found: dict[str, dict[int, dict[str, str]]] = {}
    for path in leaves:
        for number in re.finditer(r"(?<!\d)\d+(?=/)", path):
            start, rest = path[: number.start()], path[number.end() :]
            found.setdefault(start, {}).setdefault(int(number[0]), {})[f"{start}*{rest}"] = path
    return found


def _runs(layers: dict[int, dict[str, str]], leaves: Mapping[str, Leaf]) -> list[list[dict[str, str]]]:
    """Returns neighbours that have the same parameters, two at least."""
    runs: list[list[dict[str, str]]] = []
    before: tuple[int, dict] = (-2, {})
    for number in sorted(layers):
        kind = {stack: leaves[path] for stack, path in layers[number].items()}
        if (number - 1, kind) == before:
            runs[-1].append(layers[number])
        else:
            runs.append([layers[number]])
        before = number, kind
    return [run for run in runs if len(run) > 1]
