"""Finds stacks of equal layers without annotations by the shapes of their parameters.

    blocks/attn/key/kernel   [12, 64, 4, 16]
    blocks/attn/key/bias     [12, 4, 16]        all have the same dim 0: twelve layers
    blocks/ln_1/scale        [12, 64]
    wte/embedding            [512, 64]          another number: outside of the stack

A pipeline looks for a stack if no dim of the model is named `layers`. When the step is traced, jaxpar checks that the
layers read these parameters and no others.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace

from jaxpar.sharding.lists import Lists, longest_list, num_bytes
from jaxpar.sharding.names import Leaf
from jaxpar.sharding.rules import Axes, AxisChoice


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
