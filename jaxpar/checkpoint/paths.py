"""A state as path to array: a checkpoint does not depend on Python classes."""

from collections.abc import Mapping
from typing import Any

import jax

from jaxpar.checkpoint.manifest import Array
from jaxpar.sharding.names import path_of


def flat(state: Any) -> dict[str, Any]:
    """Returns a state as path to array, `params/blocks/mlp/up`."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def unflat(like: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns the tree of `like` with the arrays at its paths."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(tree, [arrays[path_of(keys)] for keys, _ in leaves])


def described(state: Any) -> dict[str, Array]:
    """Returns shape, dtype and bytes of every array of a state, which may be abstract."""
    return {
        path: Array(tuple(leaf.shape), str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
        for path, leaf in flat(state).items()
    }
