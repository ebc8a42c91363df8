"""The program of a model that is called once, on shapes alone: what its parameters' dims are read from."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import jax

from jaxpar.sharding.author.explicit import no_mesh, sharding_translation
from jaxpar.sharding.names import Blueprint, Compute, Program, Tree, path_of
from jaxpar.sharding.nnx.hooks import hooked


def traced(init: Callable, bind: Callable, call: Callable[[Any], Any]) -> Program:
    """Returns the program of a call, and the paths of the parameters that are its first arguments.

    Args:
      init: Of a blueprint.
      bind: Likewise.
      call: Calls a model once, as training will.
    """

    def program(values: Tree, state: Tree) -> None:
        call(bind(values, state, lambda _, value: value, Compute()))

    with sharding_translation(), hooked(), no_mesh():
        values, state = jax.eval_shape(init, jax.random.key(0))
        paths = tuple(path_of(keys) for keys, _ in jax.tree_util.tree_flatten_with_path(values)[0])
        return jax.make_jaxpr(program)(values, state), paths


def as_called(blueprint: Blueprint, call: Callable[[Any], Any]) -> Blueprint:
    """Returns a model that is known by such a call, which is traced when it is asked for; one that is known stays."""
    if blueprint.program is not None:
        return blueprint
    return replace(blueprint, program=cache(lambda: traced(blueprint.init, blueprint.bind, call)))


def zeros(like: Any) -> Any:
    """Returns what a model is called with, for arrays or what has their shape and dtype; anything else as it is."""
    if not (hasattr(like, "shape") and hasattr(like, "dtype")):
        return like
    if jax.numpy.issubdtype(like.dtype, jax.dtypes.prng_key):
        return jax.numpy.broadcast_to(jax.random.key(0), like.shape)
    return jax.numpy.zeros(like.shape, like.dtype)
