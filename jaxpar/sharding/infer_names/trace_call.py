"""Traces one call of a model on abstract inputs; its parameters' dims are inferred from this program."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax

from jaxpar.models.islands import use_islands
from jaxpar.sharding.author.explicit import no_mesh, sharding_translation
from jaxpar.sharding.names import Blueprint, Compute, Program, Tree, path_of
from jaxpar.sharding.nnx.hooks import step_hooks


def trace_program(init: Callable, bind: Callable, call: Callable[[Any], Any]) -> Program:
    """Returns the jaxpr of a call, and the paths of the parameters, which are its first arguments.

    Args:
      init: `Blueprint.init`.
      bind: `Blueprint.bind`.
      call: Calls a model once, in the way that the loss will.
    """

    def program(values: Tree, state: Tree) -> None:
        call(bind(values, state, lambda _, value: value, Compute()))

    from jaxpar.models.experts import active_experts  # loaded only where a model is traced

    with sharding_translation(), step_hooks(), no_mesh():
        values, state = jax.eval_shape(init, jax.random.key(0))
        paths = tuple(path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(values)[0])
        # all experts in one matmul: in a loop over them, a stack of experts would look like a stack of layers
        with use_islands({"mixture": active_experts}):
            return jax.make_jaxpr(program)(values, state), paths


def with_program(blueprint: Blueprint, call: Callable[[Any], Any]) -> Blueprint:
    """Attaches a lazily traced program (one call on abstract inputs) to the blueprint, unless it has one."""
    if blueprint.program is not None:
        return blueprint
    return replace(blueprint, program=cache(lambda: trace_program(blueprint.init, blueprint.bind, call)))


def zeros_like_input(example: Any) -> Any:
    """Returns zeros for an array, or for anything with shape and dtype; other values unchanged."""
    if not (hasattr(example, "shape") and hasattr(example, "dtype")):
        return example
    if jax.numpy.issubdtype(example.dtype, jax.dtypes.prng_key):
        return jax.numpy.broadcast_to(jax.random.key(0), example.shape)
    return jax.numpy.zeros(example.shape, example.dtype)
