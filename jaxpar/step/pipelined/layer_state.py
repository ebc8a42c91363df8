"""What the layers keep beside their parameters, such as the keys of their dropout.

    a stack   blocks/drop/rngs/dropout/count     [12]   ──► a stage has the entries of its own layers
    a list    blocks/0/drop/rngs/dropout/count   []     ──► likewise, of the stack that they make together

They go to the stages as what each layer has of its own, beside that which the model gives `jp.pipelined`.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.parallel.layout import Layout
from jaxpar.sharding.lists import modules_of
from jaxpar.sharding.names import Tree, path_of

Own = Sequence[tuple[int, ...]]  # leaves of the model's state: one of a stack, or one of each layer of a list


def of_layers(layout: Layout, model_state: Tree) -> Own:
    """Returns which leaves of a model's state belong to its layers.

    Those of a stack lie in a module of which all parameters are in the stack, and have as many entries as there are
    layers; those of a list lie in its layers.
    """
    leaves, _ = jax.tree_util.tree_flatten_with_path(model_state)
    paths = {path_of(keys): i for i, (keys, _) in enumerate(leaves)}
    if layout.lists:
        return _of_list(layout, paths)
    stacked = {path: layout.placements[path].leaf.shape[0] for path in layout.stacked}
    inside = {module for path in stacked for module in _modules(path)}
    inside -= {module for path in layout.placements if path not in stacked for module in _modules(path)}
    counts = set(stacked.values())
    return [
        (i,)
        for path, i in paths.items()
        if leaves[i][1].shape[:1] and leaves[i][1].shape[0] in counts and inside.intersection(_modules(path))
    ]


def taken(model_state: Tree, which: Own) -> list[jax.Array]:
    """Returns these leaves of a state, each with a leading dim of layers."""
    leaves = jax.tree.leaves(model_state)
    return [leaves[own[0]] if len(own) == 1 else jnp.stack([leaves[i] for i in own]) for own in which]


def given(model_state: Tree, which: Own, values: Sequence[jax.Array]) -> Tree:
    """Returns the state with these leaves; of a list with those of its first layers."""
    leaves, tree = jax.tree.flatten(model_state)
    for own, value in zip(which, values, strict=True):
        if len(own) == 1:
            leaves[own[0]] = value
        else:
            for i, layer in zip(own, value, strict=False):
                leaves[i] = layer
    return jax.tree.unflatten(tree, leaves)


def _of_list(layout: Layout, paths: dict[str, int]) -> Own:
    return [
        tuple(paths[module + path.removeprefix(modules[0])] for module in modules)
        for modules in modules_of(layout.lists)
        for path in paths
        if path.startswith(modules[0] + "/")
    ]


def _modules(path: str) -> list[str]:
    words = path.split("/")
    return ["/".join(words[:depth]) for depth in range(1, len(words))]
