"""Flattens a state to path → array, so that a checkpoint does not depend on Python classes."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.checkpoint.manifest import Array
from jaxpar.sharding.names import path_of


def flatten(state: Any) -> dict[str, Any]:
    """Flattens a state to a dict from path, such as `params/blocks/mlp/up`, to array."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def unflatten(like: Any, arrays: Mapping[str, Any]) -> Any:
    """Rebuilds the tree of `like` from arrays by path."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(tree, [arrays[path_of(keys)] for keys, _ in leaves])


def describe(state: Any) -> dict[str, Array]:
    """Shape, dtype and bytes of every array of a state, which may be abstract, by path."""
    return {
        path: Array(tuple(leaf.shape), str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
        for path, leaf in flatten(state).items()
    }
