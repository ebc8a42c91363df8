"""What the layers of a stack keep beside their parameters, such as the keys of their dropout, one entry each.

    model_state   blocks/drop/rngs/dropout/count   [12]   ──► a stage has the entries of its own layers

They go to the stages as what each layer has of its own, beside that which the model gives `jp.pipelined`.
"""

from collections.abc import Sequence

import jax

from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, path_of


def of_layers(layout: Layout, model_state: Tree) -> list[int]:
    """Returns which leaves of a model's state belong to its stack.

    They lie in a module of which all parameters are in the stack, and have as many entries as there are layers.
    """
    stacked = {path: layout.placements[path].leaf.shape[0] for path in layout.stacked}
    inside = {module for path in stacked for module in _modules(path)}
    inside -= {module for path in layout.placements if path not in stacked for module in _modules(path)}
    counts = set(stacked.values())
    leaves, _ = jax.tree_util.tree_flatten_with_path(model_state)
    return [
        i
        for i, (keys, leaf) in enumerate(leaves)
        if leaf.shape[:1] and leaf.shape[0] in counts and inside.intersection(_modules(path_of(keys)))
    ]


def taken(model_state: Tree, which: Sequence[int]) -> list[jax.Array]:
    """Returns these leaves of a state."""
    leaves = jax.tree.leaves(model_state)
    return [leaves[i] for i in which]


def given(model_state: Tree, which: Sequence[int], values: Sequence[jax.Array]) -> Tree:
    """Returns the state with these leaves."""
    leaves, tree = jax.tree.flatten(model_state)
    for i, value in zip(which, values, strict=True):
        leaves[i] = value
    return jax.tree.unflatten(tree, leaves)


def _modules(path: str) -> list[str]:
    words = path.split("/")
    return ["/".join(words[:depth]) for depth in range(1, len(words))]
