"""Finds lists of equal layers by the names and shapes of their parameters.

    blocks/0/attn/kernel   [64, 64]
    blocks/1/attn/kernel   [64, 64]      equal neighbours: a list of layers, whose stack is called
    blocks/2/attn/kernel   [64, 64]      blocks/*/attn/kernel [3, 64, 64]

Linen's `h_0`, `h_1`, ... become `h_*`, and likewise any other word that ends with a number, `block1` or `blocks.0`. A
pipeline runs a list as a stack; each parameter keeps its name, so that checkpoints do not change.

If layers of several kinds repeat in the same order, each repetition is one group, with one layer of each kind. For
recurrent, recurrent, attention, recurrent, ... the list is

    blocks/0/rnn/kernel, blocks/3/rnn/kernel, ...      blocks/*/rnn/kernel
    blocks/1/rnn/kernel, blocks/4/rnn/kernel, ...      blocks/*+1/rnn/kernel
    blocks/2/attn/kernel, blocks/5/attn/kernel, ...    blocks/*+2/attn/kernel
"""

import re
from collections.abc import Iterable, Mapping
from typing import Any

from jaxpar.sharding.names import Leaf

Lists = dict[str, tuple[str, ...]]  # path of a stack's parameter to the layers' paths, in order


def longest_list(leaves: Mapping[str, Leaf], parts: int) -> Lists:
    """Finds the list of equal layers with the most parameters, and returns it as a stack; empty if there is none.

    Args:
      leaves: All parameters of a model, by path.
      parts: A number that divides the number of layers, or of groups of layers of several kinds.
    """
    lists = (run for layers in _group_paths(leaves).values() for run in _runs(layers, leaves) if len(run) % parts == 0)
    best = max(lists, key=lambda run: num_bytes(leaves, (path for group in run for path in group.values())), default=[])
    if not best:
        return {}
    return {stack: tuple(group[stack] for group in best) for stack in best[0]}


def num_bytes(leaves: Mapping[str, Leaf], paths: Iterable[str]) -> int:
    """Returns the bytes of these parameters."""
    return sum(leaves[path].bytes for path in paths)


def layer_modules(lists: Lists) -> list[tuple[str, ...]]:
    """Returns, for each layer of a group in order, the paths of its modules in all groups.

    >>> layer_modules({"h_*/w": ("h_0/w", "h_2/w"), "h_*+1/u": ("h_1/u", "h_3/u"), "h_*+1/v": ("h_1/v", "h_3/v")})
    [('h_0', 'h_2'), ('h_1', 'h_3')]
    """
    kinds = {}
    for stack, members in lists.items():
        start = stack.index("*")
        place = re.match(r"\+(\d+)/", stack[start + 1 :])
        numbers = [re.match(r"\d+", member[start:]) for member in members]
        ends = [start + number.end() for number in numbers if number]
        kinds[int(place[1]) if place else 0] = tuple(m[:end] for m, end in zip(members, ends, strict=True))
    return [kinds[place] for place in sorted(kinds)]


def _group_paths(leaves: Mapping[str, Leaf]) -> dict[str, dict[int, dict[str, str]]]:
    """Groups parameters by the part of the path before a number; a group is {number: {path with "*": path}}."""
    layers: dict[str, dict[int, dict[str, str]]] = {}
    for path in leaves:
        for number in re.finditer(r"(?<!\d)\d+(?=/)", path):
            start, suffix = path[: number.start()], path[number.end() :]
            layers.setdefault(start, {}).setdefault(int(number[0]), {})[suffix] = path
    return {
        start: {n: {f"{start}*{suffix}": path for suffix, path in params.items()} for n, params in by_number.items()}
        for start, by_number in layers.items()
    }


def _runs(layers: dict[int, dict[str, str]], leaves: Mapping[str, Leaf]) -> list[list[dict[str, str]]]:
    """Returns runs of two or more consecutive groups with equal parameters; runs of smaller groups come first."""
    kinds = {number: {stack: leaves[path] for stack, path in layers[number].items()} for number in layers}
    runs = []
    for period in range(1, len(layers) // 2 + 1):
        for start, length in _periodic(kinds, period):
            numbers = range(start, start + length - length % period)
            groups = [numbers[i : i + period] for i in range(0, len(numbers), period)]
            runs.append([_merge_layers([layers[number] for number in group]) for group in groups])
    return runs


def _periodic(kinds: Mapping[int, Any], period: int) -> list[tuple[int, int]]:
    """Returns (first number, count) of the longest runs in which each layer equals the one `period` before it."""
    runs, numbers = [], sorted(kinds)
    while numbers:
        start, length = numbers[0], 1
        while (number := start + length) in kinds and (length < period or kinds[number] == kinds[number - period]):
            length += 1
        group = [kinds[start + i] for i in range(min(period, length))]
        shorter = any(period % part == 0 and group == group[:part] * (period // part) for part in range(1, period))
        repeats = length >= 2 * period and not shorter
        if repeats:
            runs.append((start, length))
        resume = start + (length - length % period if repeats else 1)
        numbers = [number for number in numbers if number >= resume]
    return runs


def _merge_layers(layers: list[dict[str, str]]) -> dict[str, str]:
    """Merges the parameters of a group's layers into one dict; the name of its second layer becomes `h_*+1`."""
    return {
        stack if place == 0 else stack.replace("*", f"*+{place}", 1): path
        for place, layer in enumerate(layers)
        for stack, path in layer.items()
    }
