"""Parameters that an optimizer never looks at: their gradients are not computed, reduced, kept or counted.

    optax.multi_transform({"train": adamw, "freeze": optax.set_to_zero()}, labels)
    optax.masked(optax.set_to_zero(), frozen), optax.freeze: likewise

Asked of the update itself, not of labels: a gradient that nothing reads need not be there. So a chain that clips by the
global norm of all parameters before it freezes some does read theirs, and gets them, as in plain optax; one that clips
inside of `multi_transform` does not.
"""

from collections.abc import Set
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Var

from jaxpar.optim.probe import updated
from jaxpar.parallel.layout import Layout
from jaxpar.pipeline.jaxprs.dataflow import CALLS, jaxpr_of, variables
from jaxpar.sharding.names import Tree, path_of


def frozen(layout: Layout, optimizer: optax.GradientTransformation) -> frozenset[str]:
    """Returns the paths of the parameters whose gradients an update of the optimizer does not read."""
    state = jax.eval_shape(optimizer.init, layout.params)  # of one replica, where replicas step apart
    # only what masks can leave a gradient unread: with other optimizers nothing is traced to find that none is
    if not any(map(_is_masked, jax.tree.leaves(state, is_leaf=_is_masked))):
        return frozenset()
    update = partial(updated, optimizer)
    # of matrices in 8 bits no chain need make sense of gradients to be asked whether it reads them
    params = jax.tree.map(lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else _float(x.shape), layout.params)
    closed = jax.make_jaxpr(update)(params, state, params, _float(()))
    read = _read(closed.jaxpr, set(range(len(closed.jaxpr.outvars))))
    keyed, _ = jax.tree_util.tree_flatten_with_path(layout.params)  # the gradients are the first of the arguments
    return frozenset(path_of(keys) for index, (keys, _) in enumerate(keyed) if index not in read)


def without(paths: Set[str], tree: Tree) -> Tree:
    """Returns a tree of parameters, or of what stands for them, with None at these paths."""
    if not paths:
        return tree
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: None if path_of(keys) in paths else leaf, tree)


def joined(tree: Tree, other: Tree) -> Tree:
    """Returns a tree with what another has wherever it has None."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=lambda leaf: leaf is None)


def zeroed(paths: Set[str], layout: Layout, gradients: Tree) -> Tree:
    """Returns gradients that are zero at these paths, whatever they were there."""
    if not paths:
        return gradients
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), layout.params)
    return joined(without(paths, gradients), zeros)


def _float(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedState)


def _read(jaxpr: Jaxpr, outs: Set[int]) -> set[int]:
    """Returns which inputs these outputs may depend on: in a loop or a branch, on all that it is given."""
    live: set[Var] = variables(jaxpr.outvars[index] for index in outs)
    for eqn in reversed(jaxpr.eqns):
        made = {index for index, var in enumerate(eqn.outvars) if var in live}
        if not made:
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in CALLS else None
        ins = eqn.invars if inner is None else [eqn.invars[index] for index in _read(jaxpr_of(inner), made)]
        live |= variables(ins)
    return {index for index, var in enumerate(jaxpr.invars) if var in live}
