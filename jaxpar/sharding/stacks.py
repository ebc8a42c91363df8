"""Stacks of equal layers that nobody annotated, found by the shapes of their parameters.

    blocks/attn/key/kernel   [12, 64, 4, 16]
    blocks/attn/key/bias     [12, 4, 16]        all have as many entries in dim 0: twelve layers
    blocks/ln_1/scale        [12, 64]
    wte/embedding            [512, 64]          another number: outside of the stack

A pipeline looks for one where no dim of the model is named `layers`. That the layers read these parameters and no
others is checked later, when the step is traced.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxpar.sharding.lists import Lists, longest_list, size_of
from jaxpar.sharding.names import Leaf
from jaxpar.sharding.rules import Axes, Choice


def unnamed_layers(
    leaves: Mapping[str, Leaf], parts: int, patterns: Mapping[str, Iterable]
) -> tuple[frozenset[str], Lists]:
    """Returns the layers of a model that names none: a stack, or a list, whichever has more parameters.

    Args:
      leaves: All parameters of a model, by path.
      parts: Divides the number of layers.
      patterns: The user's rules, ends of paths to names of dims.
    """
    named = (*(leaf.names or () for leaf in leaves.values()), *patterns.values())
    if any("layers" in names for names in named):
        return frozenset(), {}
    stack, lists = bare_stack(leaves, parts, patterns), longest_list(leaves, parts)
    members = [path for paths in lists.values() for path in paths]
    return (stack, {}) if size_of(leaves, stack) >= size_of(leaves, members) else (frozenset(), lists)


def bare_stack(leaves: Mapping[str, Leaf], parts: int, patterns: Mapping[str, Iterable]) -> frozenset[str]:
    """Returns the paths of the largest module whose parameters all have one more dim, the same number of layers.

    One of several parameters is a matrix of its own. Parameters side by side in a module that has others too are a
    stack where a layer has a vector as well: by matrices alone a projection [embed, heads, head_dim] could be one.

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
        and _is_stack({len(leaves[path].shape) for path in paths}, len(paths), beside="*" in module)
        and all(_may_be_stacked(path, leaves[path], patterns) for path in paths)
    ]
    return frozenset(max(stacks, key=lambda paths: size_of(leaves, paths), default=()))


def one_layer(leaf: Leaf) -> Leaf:
    """Returns a parameter of a stack as one layer has it."""
    names, axes = (
        given[-len(leaf.shape) + 1 :] if given and len(leaf.shape) > 1 else None for given in (leaf.names, leaf.axes)
    )
    return replace(leaf, shape=leaf.shape[1:], names=names, axes=axes)


def of_all_layers(choice: Choice, layers: Axes) -> Choice:
    """Returns the choice for a parameter of a stack from that for one layer, with its dim 0 over these axes."""
    axes = (layers,) if isinstance(layers, str) else tuple(layers or ())
    return Choice(("layers", *choice.names), (axes, *choice.axes), f"stack of layers, by its shapes; {choice.why}")


def of_another_stack(choice: Choice) -> Choice:
    """Returns the choice for a parameter that no stage has a share of: a stack of which one is made by its path."""
    if choice.names[:1] != ("layers",):
        return choice
    return Choice((None, *choice.names[1:]), ((), *choice.axes[1:]), f"{choice.why}, but not of the largest stack")


def _is_stack(ranks: set[int], count: int, *, beside: bool) -> bool:
    """Returns whether parameters of these ranks, that have as many entries in dim 0, may be those of a stack."""
    return max(ranks) > 2 and (min(ranks) == 2 if beside else count > 1)


def _roots(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Returns the outermost module around each parameter whose parameters all have as many entries in dim 0."""
    sizes: dict[str, set[int]] = {}
    for path, leaf in leaves.items():
        for module in _modules(path):
            sizes.setdefault(module, set()).add(leaf.shape[0] if leaf.shape else 0)
    # the whole model is no stack: what its layers take, and what becomes of it, is made outside of them
    even = {module for module, each in sizes.items() if module and len(each) == 1 and 0 not in each}
    inside = {path: [module for module in _modules(path) if module in even] for path in leaves}
    alone = {
        path: f"{path.rpartition('/')[0]}/* of {leaves[path].shape[0]}"
        for path, modules in inside.items()
        if not modules and leaves[path].shape
    }
    return {path: modules[0] for path, modules in inside.items() if modules} | alone


def _modules(path: str) -> list[str]:
    """Returns the modules around a parameter, outermost first."""
    words = path.split("/")
    return ["/".join(words[:depth]) for depth in range(len(words))]


def _may_be_stacked(path: str, leaf: Leaf, patterns: Mapping[str, Iterable]) -> bool:
    """Returns whether neither the model nor the user says what dim 0 is."""
    rules = (tuple(names) for pattern, names in patterns.items() if re.search(rf"(^|/)(?:{pattern})$", path))
    if given := next(rules, ()):
        return len(given) < len(leaf.shape)
    return not leaf.names or len(leaf.names) < len(leaf.shape) or leaf.names[0] is None
