"""Optimizers whose rule is of one parameter as a whole, applied to each layer of a stack as if it were alone.

    blocks/w  [layers, embed, mlp]    lamb: a trust ratio for each layer      jax.vmap of the optimizer over dim 0
    embed     [vocab, embed]          lamb: one trust ratio                   the optimizer

Optax takes an array for a parameter: of a stack, its norms would be those of all layers together. Optimizers that treat
each number by itself, such as Adam, or all parameters as one, such as D-Adaptation, are the same either way.

Sources: You et al. (2017), arXiv:1708.03888, algorithm 1; You et al. (2019), arXiv:1904.00962, algorithm 2.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import optax

from jaxpar.optim.muon import STACKS, Names

# those of optax that take a norm, a root mean square, a maximum or singular vectors of an array
LAYERWISE = ("adafactor", "fromage", "galore", "lamb", "lars", "novograd", "sm3")


def stack_dims(names: Names) -> dict[str, int]:
    """Returns how many leading dims of each parameter are stacks of layers or experts, of those that have any."""
    counts = {path: sum(1 for _ in takewhile(lambda name: name in STACKS, dims or ())) for path, dims in names.items()}
    return {path: count for path, count in counts.items() if count}


def of_one_layer(names: Callable[[], Names]) -> Callable[[], Names]:
    """Returns a function that returns the names of dims without those of stacks."""

    def inner() -> Names:
        known = names()
        counts = stack_dims(known)
        return {path: dims[counts.get(path, 0) :] if dims else dims for path, dims in known.items()}

    return inner


def per_layer(
    optimizer: optax.GradientTransformation, names: Callable[[], Names]
) -> optax.GradientTransformationExtraArgs:
    """Returns an optimizer that updates each layer of a stack as it updates a parameter of its own.

    Its state holds what the optimizer's does, with the dims of the stack first: also counts, one for each layer.

    Args:
      optimizer: What updates one layer. Masks in it see parameters without the dims of their stacks.
      names: Returns the names of the dims of each parameter by its path: leading ones among `STACKS` are stacks.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: Any) -> Any:
        groups = _groups(params, names)
        if not any(depth for _, depth, _ in groups):
            return inner.init(params)
        return {label: _mapped(inner.init, depth)(part) for label, depth, part in groups}

    def update(updates: Any, state: Any, params: Any = None, **extra: Any) -> tuple[Any, Any]:
        groups = _groups(updates, names)
        if not any(depth for _, depth, _ in groups):
            return inner.update(updates, state, params, **extra)
        made, new = {}, {}
        weights = {label: part for label, _, part in _groups(params, names)} if params is not None else {}
        one = partial(_updated, inner, extra)
        for label, depth, part in groups:
            made[label], new[label] = _mapped(one, depth)(part, state[label], weights.get(label))
        return _joined(updates, made, names), new

    return optax.GradientTransformationExtraArgs(init, update)


def _updated(inner: Any, extra: Mapping[str, Any], grads: Any, state: Any, params: Any) -> tuple[Any, Any]:
    return inner.update(grads, state, params, **extra)


def _mapped(function: Callable, depth: int) -> Callable:
    for _ in range(depth):
        function = jax.vmap(function)
    return function


def _labels(tree: Any, names: Callable[[], Names]) -> Any:
    """Returns for each array the sizes of its stacks, as text: what is mapped together; "one" where it is none."""
    counts = stack_dims(names())

    def label(keys: Any, leaf: Any) -> str:
        depth = counts.get(jax.tree_util.keystr(keys, simple=True, separator="/"), 0)
        return "x".join(map(str, leaf.shape[:depth])) if depth else "one"

    return jax.tree_util.tree_map_with_path(label, tree)


def _groups(tree: Any, names: Callable[[], Names]) -> list[tuple[str, int, Any]]:
    """Returns (label, dims of stacks, the tree with the arrays of that label alone) of each label."""
    labels = _labels(tree, names)
    found = []
    for label in sorted(set(jax.tree.leaves(labels))):
        part = jax.tree.map(lambda own, leaf, label=label: leaf if own == label else optax.MaskedNode(), labels, tree)
        found.append((label, 0 if label == "one" else label.count("x") + 1, part))
    return found


def _joined(tree: Any, parts: Mapping[str, Any], names: Callable[[], Names]) -> Any:
    """Returns a tree like `tree`, each array from the part of its label."""
    labels, structure = jax.tree.flatten(_labels(tree, names))
    each = {label: iter(jax.tree.leaves(part)) for label, part in parts.items()}
    return jax.tree.unflatten(structure, [next(each[label]) for label in labels])
