"""Finds the layers of a model that names no dim `layers`, by the names and shapes of their parameters.

A stack: parameters that all have the same dim 0.

    blocks/attn/key/kernel   [12, 64, 4, 16]
    blocks/attn/key/bias     [12, 4, 16]        all have the same dim 0: twelve layers
    blocks/ln_1/scale        [12, 64]
    wte/embedding            [512, 64]          another number: outside of the stack

A list: equal neighbours, whose stack is called blocks/*/attn/kernel [3, 64, 64].

    blocks/0/attn/kernel   [64, 64]
    blocks/1/attn/kernel   [64, 64]
    blocks/2/attn/kernel   [64, 64]

Linen's `h_0`, `h_1`, ... become `h_*`, and likewise any other word that ends with a number, `block1` or `blocks.0`. A
pipeline runs a list as a stack; each parameter keeps its name, so that checkpoints do not change.

If layers of several kinds repeat in the same order, each repetition is one group, with one layer of each kind. For
recurrent, recurrent, attention, recurrent, ... the list is

    blocks/0/rnn/kernel, blocks/3/rnn/kernel, ...      blocks/*/rnn/kernel
    blocks/1/rnn/kernel, blocks/4/rnn/kernel, ...      blocks/*+1/rnn/kernel
    blocks/2/attn/kernel, blocks/5/attn/kernel, ...    blocks/*+2/attn/kernel

When the step is traced, jaxpar checks that the layers read these parameters and no others.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

from jaxpar.sharding.names import Leaf
from jaxpar.sharding.rules import Axes, AxisChoice

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


def unnamed_layers(
    leaves: Mapping[str, Leaf], parts: int, patterns: Mapping[str, Iterable]
) -> tuple[frozenset[str], Lists]:
    """Finds the layers of a model that names no dim `layers`: its largest stack or list, whichever is larger.

    Args:
      leaves: All parameters of a model, by path.
      parts: Divides the number of layers.
      patterns: The user's rules, ends of paths to names of dims.
    """
    named = (*(leaf.names or () for leaf in leaves.values()), *patterns.values())
    if any("layers" in names for names in named):
        return frozenset(), {}
    stack, lists = unnamed_stack(leaves, parts, patterns), longest_list(leaves, parts)
    members = [path for paths in lists.values() for path in paths]
    return (stack, {}) if num_bytes(leaves, stack) >= num_bytes(leaves, members) else (frozenset(), lists)


def unnamed_stack(leaves: Mapping[str, Leaf], parts: int, patterns: Mapping[str, Iterable]) -> frozenset[str]:
    """Returns the parameters of the largest module in which all parameters have the same dim 0, the number of layers.

    A single parameter is a matrix, not a stack. Some of a module's direct parameters are a stack only if there is a
    vector per layer among them: without one, a projection [embed, heads, head_dim] would look like a stack.

    Args:
      leaves: All parameters of a model, by path.
      parts: Divides the number of layers.
      patterns: The user's rules, ends of paths to names of dims.
    """
    modules: dict[str, set[str]] = {}
    for path, root in _roots(leaves).items():
        modules.setdefault(root, set()).add(path)
    stacks = [
        paths
        for module, paths in modules.items()
        if not any(leaves[path].shape[0] % parts for path in paths)
        and _is_stack({len(leaves[path].shape) for path in paths}, len(paths), side_by_side="*" in module)
        and all(_may_be_stacked(path, leaves[path], patterns) for path in paths)
    ]
    return frozenset(max(stacks, key=lambda paths: num_bytes(leaves, paths), default=()))


def unstack_leaf(leaf: Leaf) -> Leaf:
    """Returns the declaration of one layer's parameter, from that of the stack."""
    names, axes = (
        words[-len(leaf.shape) + 1 :] if words and len(leaf.shape) > 1 else None for words in (leaf.names, leaf.axes)
    )
    return replace(leaf, shape=leaf.shape[1:], names=names, axes=axes)


def stack_choice(choice: AxisChoice, layers: Axes) -> AxisChoice:
    """Extends the choice of axes for one layer to the stack, whose dim 0 these axes split."""
    axes = (layers,) if isinstance(layers, str) else tuple(layers or ())
    return AxisChoice(("layers", *choice.names), (axes, *choice.axes), f"stack of layers, by its shapes; {choice.why}")


def unstack_choice(choice: AxisChoice) -> AxisChoice:
    """Leaves dim 0 unsplit for a parameter in another stack than the one that the pipeline runs."""
    if choice.names[:1] != ("layers",):
        return choice
    return AxisChoice((None, *choice.names[1:]), ((), *choice.axes[1:]), f"{choice.why}, but not of the largest stack")


def _is_stack(ranks: set[int], count: int, *, side_by_side: bool) -> bool:
    """Whether parameters of these ranks, all with the same dim 0, may form a stack."""
    return max(ranks) > 2 and (min(ranks) == 2 if side_by_side else count > 1)


def _roots(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Maps each parameter to the outermost module around it whose parameters all have the same dim 0."""
    sizes: dict[str, set[int]] = {}
    for path, leaf in leaves.items():
        for module in _modules(path):
            sizes.setdefault(module, set()).add(leaf.shape[0] if leaf.shape else 0)
    # the whole model is no stack: embedding and head lie outside of the layers
    even = {module for module, lengths in sizes.items() if module and len(lengths) == 1 and 0 not in lengths}
    candidates = {path: [module for module in _modules(path) if module in even] for path in leaves}
    by_length = {
        path: f"{path.rpartition('/')[0]}/* of {leaves[path].shape[0]}"
        for path, modules in candidates.items()
        if not modules and leaves[path].shape
    }
    return {path: modules[0] for path, modules in candidates.items() if modules} | by_length


def _modules(path: str) -> list[str]:
    words = path.split("/")
    return ["/".join(words[:depth]) for depth in range(len(words))]


def _may_be_stacked(path: str, leaf: Leaf, patterns: Mapping[str, Iterable]) -> bool:
    """Whether neither the model nor the user names dim 0 of a parameter."""
    rules = (tuple(names) for pattern, names in patterns.items() if re.search(rf"(^|/)(?:{pattern})$", path))
    if rule := next(rules, ()):
        return len(rule) < len(leaf.shape)
    return not leaf.names or len(leaf.names) < len(leaf.shape) or leaf.names[0] is None
