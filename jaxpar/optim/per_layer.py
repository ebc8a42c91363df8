"""Applies an optimizer to each layer of a stack separately, if its rule uses norms or other functions of a parameter.

    blocks/w  [layers, embed, mlp]    lamb: one trust ratio per layer         jax.vmap of the optimizer over dim 0
    embed     [vocab, embed]          lamb: one trust ratio                   the optimizer

Optax treats an array as one parameter, so it would take one norm of all layers of a stack together. This makes no
difference for optimizers that treat each element separately, such as Adam, or all parameters as one, such as
D-Adaptation.

Sources: You et al. (2017), arXiv:1708.03888, algorithm 1; You et al. (2019), arXiv:1904.00962, algorithm 2.
"""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import takewhile
from typing import Any

import jax
import optax
from jax.tree_util import KeyPath

from jaxpar.optim.muon import STACKS, Names

# optax optimizers that take a norm, a root mean square, a maximum or singular vectors of an array
LAYERWISE = ("adafactor", "fromage", "galore", "lamb", "lars", "novograd", "sm3")


def stack_dims(names: Names) -> dict[str, int]:
    """Maps the path of each stacked parameter to its number of leading dims that stack layers or experts."""
    counts = {path: sum(1 for _ in takewhile(lambda name: name in STACKS, dims or ())) for path, dims in names.items()}
    return {path: count for path, count in counts.items() if count}


def without_stack_dims(names: Callable[[], Names]) -> Callable[[], Names]:
    """Wraps `names` to omit the dims of stacks."""

    def inner() -> Names:
        dim_names = names()
        counts = stack_dims(dim_names)
        return {path: dims[counts.get(path, 0) :] if dims else dims for path, dims in dim_names.items()}

    return inner


def per_layer(
    optimizer: optax.GradientTransformation, names: Callable[[], Names]
) -> optax.GradientTransformationExtraArgs:
    """Wraps an optimizer to update each layer of a stack as a separate parameter.

    The state has the optimizer's structure with the dims of the stack first, including counts: one per layer.

    Args:
      optimizer: Optimizer of one layer. Its masks get parameters without the dims of their stacks.
      names: Function that returns path to dim names; leading names in `STACKS` are dims of stacks.
    """
    inner = optax.with_extra_args_support(optimizer)

    def init(params: optax.Params) -> Any:
        groups = _groups(params, names)
        if not any(depth for _, depth, _ in groups):
            return inner.init(params)
        return {label: _vmap(inner.init, depth)(part) for label, depth, part in groups}

    def update(updates: optax.Updates, state: Any, params: optax.Params | None = None, **extra: Any) -> tuple[Any, Any]:
        groups = _groups(updates, names)
        if not any(depth for _, depth, _ in groups):
            return inner.update(updates, state, params, **extra)
        new_updates, new_state = {}, {}
        weights = {label: part for label, _, part in _groups(params, names)} if params is not None else {}
        update_layer = partial(_update, inner, extra)
        for label, depth, part in groups:
            new_updates[label], new_state[label] = _vmap(update_layer, depth)(part, state[label], weights.get(label))
        return _join(updates, new_updates, names), new_state

    return optax.GradientTransformationExtraArgs(init, update)


def _update(
    inner: optax.GradientTransformationExtraArgs,
    extra: Mapping[str, Any],
    grads: optax.Updates,
    state: optax.OptState,
    params: optax.Params | None,
) -> tuple[Any, Any]:
    return inner.update(grads, state, params, **extra)


def _vmap(function: Callable, depth: int) -> Callable:
    for _ in range(depth):
        function = jax.vmap(function)
    return function


def _labels(tree: Any, names: Callable[[], Names]) -> Any:
    """Labels each array with the sizes of its stacks, or "one"; one `vmap` updates all arrays with the same label."""
    counts = stack_dims(names())

    def label(keys: KeyPath, leaf: jax.Array) -> str:
        depth = counts.get(jax.tree_util.keystr(keys, simple=True, separator="/"), 0)
        return "x".join(map(str, leaf.shape[:depth])) if depth else "one"

    return jax.tree_util.tree_map_with_path(label, tree)


def _groups(tree: Any, names: Callable[[], Names]) -> list[tuple[str, int, Any]]:
    """Returns (label, number of stack dims, tree of the arrays with this label) for each label."""
    labels = _labels(tree, names)
    groups = []
    for label in sorted(set(jax.tree.leaves(labels))):
        part = jax.tree.map(lambda key, leaf, label=label: leaf if key == label else optax.MaskedNode(), labels, tree)
        groups.append((label, 0 if label == "one" else label.count("x") + 1, part))
    return groups


def _join(tree: Any, parts: Mapping[str, Any], names: Callable[[], Names]) -> Any:
    """Returns a tree like `tree` that takes each array from the tree of its label."""
    labels, structure = jax.tree.flatten(_labels(tree, names))
    leaves = {label: iter(jax.tree.leaves(part)) for label, part in parts.items()}
    return jax.tree.unflatten(structure, [next(leaves[label]) for label in labels])
