"""Non-parameter state of the layers, such as dropout keys.

    a stack   blocks/drop/rngs/dropout/count     [12]   ──► a stage gets the entries of its layers
    a list    blocks/0/drop/rngs/dropout/count   []     ──► likewise, after stacking

The step passes it to the stages as per-layer values, in addition to those that the model passes to `jp.pipelined`.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var

from jaxpar.jaxprs.dataflow import Traced, is_key, needed_equations, subfunction
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.infer_stacks import layer_modules
from jaxpar.sharding.names import Tree, format_path

LeafGroups = Sequence[
    tuple[int, ...]
]  # indices of leaves of the model state: one of a stack, or one per layer of a list


def leaf_indices(layout: Layout, model_state: Tree) -> LeafGroups:
    """Finds the leaves of a model state that belong to its layers.

    For a stack, these are leaves whose dim 0 is the number of layers, in a module whose parameters are all in the
    stack; for a list, the leaves inside its layers.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(model_state)
    paths = {format_path(keys): i for i, (keys, _) in enumerate(leaves)}
    if layout.lists:
        return _list_leaf_indices(layout, paths)
    stacked = {path: layout.placements[path].leaf.shape[0] for path in layout.stacked_paths}
    modules = {module for path in stacked for module in _parent_modules(path)}
    modules -= {module for path in layout.placements if path not in stacked for module in _parent_modules(path)}
    counts = set(stacked.values())
    return [
        (i,)
        for path, i in paths.items()
        if leaves[i][1].shape[:1] and leaves[i][1].shape[0] in counts and modules.intersection(_parent_modules(path))
    ]


def read_leaves(model_state: Tree, groups: LeafGroups) -> list[jax.Array]:
    """Reads these leaves of a state, each with layers as dim 0."""
    leaves = jax.tree.leaves(model_state)
    return [leaves[indices[0]] if len(indices) == 1 else jnp.stack([leaves[i] for i in indices]) for indices in groups]


def write_leaves(model_state: Tree, groups: LeafGroups, values: Sequence[jax.Array]) -> Tree:
    """Writes these leaves to a state; for a list, writes them to its first layers, one entry each."""
    leaves, tree = jax.tree.flatten(model_state)
    for indices, value in zip(groups, values, strict=True):
        if len(indices) == 1:
            leaves[indices[0]] = value
        else:
            for i, layer in zip(indices, value, strict=False):
                leaves[i] = layer
    return jax.tree.unflatten(tree, leaves)


def _list_leaf_indices(layout: Layout, paths: dict[str, int]) -> LeafGroups:
    return [
        tuple(paths[module + path.removeprefix(modules[0])] for module in modules)
        for modules in layer_modules(layout.lists)
        for path in paths
        if path.startswith(modules[0] + "/")
    ]


def _parent_modules(path: str) -> list[str]:
    words = path.split("/")
    return ["/".join(words[:depth]) for depth in range(1, len(words))]


# Random keys for a list of layers that store no keys: each layer uses the keys of its own position in the list.
#
#     on one device   layer 3 draws with keys that Linen derives from the model's key and the layer's name, `h_3`
#     on a stage      all layers run layer 0's program; layer 3 gets the keys that its own program derives
#
# Keys depend only on the model state, so they are computed before the layers and passed to the stages, one per layer.


def compute_keys(layers: Callable, *args: Any) -> list[jax.Array]:
    """Computes the random keys of the layers, in the order in which a layer reads them. Shape [layers] each.

    Args:
      layers: A function of args that returns the list of layer outputs.
      *args: Trees of arrays.
    """
    traced = Traced(layers, *args)
    jaxpr = traced.flat.jaxpr
    outs = jax.tree.unflatten(traced.outputs, jaxpr.outvars)
    layer_keys = [_equations_after_keys(jaxpr, jax.tree.leaves(out))[1] for out in outs]
    key_vars = [var for keys in layer_keys for var in keys]
    eqns, _ = needed_equations(jaxpr.eqns, key_vars)
    keys = subfunction(jaxpr, traced.flat.consts, jaxpr.invars, eqns, key_vars)(*jax.tree.leaves(args))
    return [jnp.stack(keys[i :: len(layer_keys[0])]) for i in range(len(layer_keys[0]))]


def run_with_keys(keys: Sequence[jax.Array], layer: Callable[[Any], Any], x: object) -> Any:
    """Runs a layer on x with these keys instead of those that it derives itself."""
    if not keys:
        return layer(x)
    traced = Traced(layer, x)
    jaxpr = traced.flat.jaxpr
    eqns, key_vars = _equations_after_keys(jaxpr, jaxpr.outvars)
    run = subfunction(jaxpr, traced.flat.consts, [*jaxpr.invars, *key_vars], eqns, jaxpr.outvars)
    return jax.tree.unflatten(traced.outputs, run(*jax.tree.leaves(x), *keys))


def makes_keys(eqn: JaxprEqn) -> bool:
    """Whether all outputs of an equation are random keys."""
    return all(map(is_key, eqn.outvars))


def _equations_after_keys(jaxpr: Jaxpr, outs: Sequence[object]) -> tuple[list[JaxprEqn], list[Var]]:
    """Returns the equations that compute these outputs from random keys, and the keys in order."""
    eqns, _ = needed_equations([eqn for eqn in jaxpr.eqns if not makes_keys(eqn)], outs)
    key_vars = dict.fromkeys(var for eqn in eqns for var in eqn.invars if not isinstance(var, Literal) and is_key(var))
    return eqns, list(key_vars)
