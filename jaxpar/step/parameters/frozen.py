"""Parameters whose gradients the optimizer never reads: these are not computed, reduced, stored or counted.

    optax.multi_transform({"train": adamw, "freeze": optax.set_to_zero()}, labels)
    optax.masked(optax.set_to_zero(), frozen), optax.freeze: likewise

The jaxpr of the update decides, not labels. A chain that clips by the global norm of all parameters before it freezes
some does read their gradients, and gets them, as in plain optax; one that clips inside `multi_transform` does not.
"""

from collections.abc import Set
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.extend.core import Jaxpr, Var

from jaxpar.jaxprs.dataflow import CALLS, jaxpr_of, variables
from jaxpar.optim.probe import update_with_loss
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.specs import abstract_params
from jaxpar.sharding.names import Tree, path_of


def frozen_paths(layout: Layout, optimizer: optax.GradientTransformation) -> frozenset[str]:
    """Returns the paths of parameters whose gradients the optimizer's update does not read."""
    state = jax.eval_shape(optimizer.init, abstract_params(layout))  # of one replica, if replicas step separately
    # only masked optimizers leave gradients unread: others need no trace
    if not any(map(_is_masked, jax.tree.leaves(state, is_leaf=_is_masked))):
        return frozenset()
    update = partial(update_with_loss, optimizer)
    # float32 stands in for 8-bit matrices, whose dtype a chain might refuse in this trace
    params = jax.tree.map(
        lambda x: x if jnp.issubdtype(x.dtype, jnp.inexact) else _float(x.shape), abstract_params(layout)
    )
    closed = jax.make_jaxpr(update)(params, state, params, _float(()))
    read_indices = _read(closed.jaxpr, set(range(len(closed.jaxpr.outvars))))
    leaves, _ = jax.tree_util.tree_flatten_with_path(abstract_params(layout))  # gradients come first
    return frozenset(path_of(keys) for index, (keys, _) in enumerate(leaves) if index not in read_indices)


def drop_paths(paths: Set[str], tree: Tree) -> Tree:
    """Returns a tree of parameters, gradients or specs with None at these paths."""
    if not paths:
        return tree
    return jax.tree_util.tree_map_with_path(lambda keys, leaf: None if path_of(keys) in paths else leaf, tree)


def fill_missing(tree: Tree, other: Tree) -> Tree:
    """Fills the None leaves of a tree from another tree."""
    return jax.tree.map(lambda a, b: b if a is None else a, tree, other, is_leaf=lambda leaf: leaf is None)


def zero_frozen(paths: Set[str], layout: Layout, gradients: Tree) -> Tree:
    """Returns gradients with zeros at these paths."""
    if not paths:
        return gradients
    zeros = jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), abstract_params(layout))
    return fill_missing(drop_paths(paths, gradients), zeros)


def _float(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def _is_masked(node: Any) -> bool:
    return isinstance(node, optax.MaskedState)


def _read(jaxpr: Jaxpr, outs: Set[int]) -> set[int]:
    """Indices of the inputs that these outputs may depend on; a loop or branch is taken to read all its inputs."""
    live: set[Var] = variables(jaxpr.outvars[index] for index in outs)
    for eqn in reversed(jaxpr.eqns):
        out_indices = {index for index, var in enumerate(eqn.outvars) if var in live}
        if not out_indices:
            continue
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")) if eqn.primitive.name in CALLS else None
        ins = eqn.invars if inner is None else [eqn.invars[index] for index in _read(jaxpr_of(inner), out_indices)]
        live |= variables(ins)
    return {index for index, var in enumerate(jaxpr.invars) if var in live}
