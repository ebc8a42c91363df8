"""Finds arrays that an NNX module holds in attributes instead of variables, often tables of positions.

self.table = jnp.arange(8)            in a module that is a pytree    data, as Flax treats an array
self.tables = (jnp.arange(8), ...)    likewise                        refused: Flax finds no array in it
self.table = jnp.arange(8)            with pytree=False               refused: on shapes alone it is lost
"""

from typing import Any

import jax
import jax.core
import numpy as np
from flax import nnx

from jaxpar.errors import refuse


def mark_arrays(model: object) -> Any:
    """Marks array attributes of a module as data, and returns the module.

    Flax marks arrays itself, but not the tracers that replace them while a function is traced.
    """
    if isinstance(model, nnx.Module):
        for _, module in nnx.iter_modules(model):
            for key, value in [*vars(module).items()]:
                if isinstance(value, jax.core.Tracer):
                    setattr(module, key, nnx.data(value))
    return model


def check_module(model: nnx.Module, name: str) -> None:
    """Refuses a module with pytree=False that has an array in an attribute.

    Args:
      model: The module with tracers; in an abstract module, arrays look like attributes that are shapes.
      name: The user's name of the model.

    Raises:
      JaxparError: With the first such attribute.
    """
    for path, module in nnx.iter_modules(model):
        for key, value in vars(module).items() if not module._pytree__is_pytree else ():
            if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value, is_leaf=_is_flax_node)):
                raise refuse(
                    f"{_join_path(path, key)} of {name} holds an array, in a module with pytree=False",
                    rule="such a module keeps arrays in variables: on shapes alone, Flax finds no other arrays in it",
                    fix=f"self.{key} = nnx.Variable(...), or class {type(module).__name__}(nnx.Module)",
                )


def check_shapes(abstract: nnx.Module, name: str) -> None:
    """Refuses an abstract module with an array inside of an attribute that Flax does not search, such as a tuple.

    Raises:
      JaxparError: If there is such an attribute; the message names the first.
    """
    for path, module in nnx.iter_modules(abstract):
        for key, value in vars(module).items():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                raise refuse(
                    f"{_join_path(path, key)} of {name} is a {type(value).__name__} with an array inside",
                    rule="a model keeps an array in a variable or an attribute, and several in a Flax container",
                    fix=f"self.{key} = nnx.data(...), or nnx.List([nnx.Param(...), ...]) if they are trained",
                )


def _join_path(path: tuple, key: str) -> str:
    return "/".join(map(str, (*path, key)))


def _is_flax_node(value: object) -> bool:
    """Whether a value registers its arrays with Flax itself: a variable or a submodule."""
    return isinstance(value, nnx.Variable | nnx.Module)
