"""Stacks of equal layers without annotations, found by the shapes of their parameters.

    blocks/attn/key/kernel   [12, 64, 4, 16]
    blocks/attn/key/bias     [12, 4, 16]        all have the same dim 0: twelve layers
    blocks/ln_1/scale        [12, 64]
    wte/embedding            [512, 64]          another number: outside of the stack

A pipeline looks for a stack if no dim of the model is named `layers`. That the layers read these parameters and no
others is checked later, when the step is traced.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxpar.sharding.lists import Lists, longest_list, size_of
from jaxpar.sharding.names import Leaf
from jaxpar.sharding.rules import Axes, AxisChoice


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
    stack, lists = unnamed_stack(leaves, parts, patterns), longest_list(leaves, parts)
    members = [path for paths in lists.values() for path in paths]
    return (stack, {}) if size_of(leaves, stack) >= size_of(leaves, members) else (frozenset(), lists)


def unnamed_stack(leaves: Mapping[str, Leaf], parts: int, patterns: Mapping[str, Iterable]) -> frozenset[str]:
    """Returns the paths of the largest module whose parameters all have one more dim, the same number of layers.

    A single parameter is a matrix, not a stack. Parameters side by side in a module that has others too are a stack
    only if a layer has a vector as well: with matrices alone, a projection [embed, heads, head_dim] could be one.

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
    return frozenset(max(stacks, key=lambda paths: size_of(leaves, paths), default=()))


def one_layer(leaf: Leaf) -> Leaf:
    """Slices one layer off the declaration of a stack's parameter."""
    names, axes = (
        words[-len(leaf.shape) + 1 :] if words and len(leaf.shape) > 1 else None for words in (leaf.names, leaf.axes)
    )
    return replace(leaf, shape=leaf.shape[1:], names=names, axes=axes)


def stack_choice(choice: AxisChoice, layers: Axes) -> AxisChoice:
    """Extends the choice for one layer to the whole stack, with dim 0 over these axes."""
    axes = (layers,) if isinstance(layers, str) else tuple(layers or ())
    return AxisChoice(("layers", *choice.names), (axes, *choice.axes), f"stack of layers, by its shapes; {choice.why}")


def unstack_choice(choice: AxisChoice) -> AxisChoice:
    """Unsplits dim 0 of a parameter that only its path makes a stack: the pipeline runs another stack."""
    if choice.names[:1] != ("layers",):
        return choice
    return AxisChoice((None, *choice.names[1:]), ((), *choice.axes[1:]), f"{choice.why}, but not of the largest stack")


def _is_stack(ranks: set[int], count: int, *, side_by_side: bool) -> bool:
    """Whether parameters of these ranks, with the same dim 0, may be those of a stack."""
    return max(ranks) > 2 and (min(ranks) == 2 if side_by_side else count > 1)


def _roots(leaves: Mapping[str, Leaf]) -> dict[str, str]:
    """Returns, for each parameter, the outermost module around it whose parameters all have the same dim 0."""
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
    """Whether neither the model nor the user names dim 0."""
    rules = (tuple(names) for pattern, names in patterns.items() if re.search(rf"(^|/)(?:{pattern})$", path))
    if rule := next(rules, ()):
        return len(rule) < len(leaf.shape)
    return not leaf.names or len(leaf.names) < len(leaf.shape) or leaf.names[0] is None
