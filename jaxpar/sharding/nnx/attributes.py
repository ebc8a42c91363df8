"""Arrays that an NNX module keeps in attributes, without a variable around them: tables of positions, often.

self.table = jnp.arange(8)            in a module that is a pytree    data, as Flax has it of an array
self.tables = (jnp.arange(8), ...)    likewise                        refused: Flax knows of no array in it
self.table = jnp.arange(8)            with pytree=False               refused: on shapes alone it is lost
"""

from typing import Any

import jax
import jax.core
import numpy as np
from flax import nnx

from jaxpar.errors import refuse


def with_arrays(made: Any) -> Any:
    """Returns a module whose attributes that are arrays are its data.

    Flax says so itself of an array, but not of what stands for one while a function is traced.
    """
    if isinstance(made, nnx.Module):
        for _, module in nnx.iter_modules(made):
            for key, value in [*vars(module).items()]:
                if isinstance(value, jax.core.Tracer):
                    setattr(module, key, nnx.data(value))
    return made


def check_made(made: nnx.Module, name: str) -> None:
    """Refuses a module with pytree=False that has an array in an attribute.

    Args:
      made: The module as it is traced: its shapes no longer tell arrays from shapes that are attributes.
      name: What the user calls it.

    Raises:
      JaxparError: With the first of them.
    """
    for path, module in nnx.iter_modules(made):
        for key, value in vars(module).items() if not module._pytree__is_pytree else ():
            if any(isinstance(leaf, jax.Array | np.ndarray) for leaf in jax.tree.leaves(value, is_leaf=_is_own)):
                raise refuse(
                    f"{_where(path, key)} of {name} holds an array, in a module with pytree=False",
                    rule="such a module keeps arrays in variables: Flax finds no others in it on shapes alone",
                    fix=f"self.{key} = nnx.Variable(...), or class {type(module).__name__}(nnx.Module)",
                )


def check_shapes(abstract: nnx.Module, name: str) -> None:
    """Refuses a module, as shapes, that has an array in an attribute where Flax knows of none.

    Raises:
      JaxparError: With the first of them.
    """
    for path, module in nnx.iter_modules(abstract):
        for key, value in vars(module).items():
            if any(isinstance(leaf, jax.core.Tracer) for leaf in jax.tree.leaves(value)):
                raise refuse(
                    f"{_where(path, key)} of {name} is a {type(value).__name__} with an array inside",
                    rule="a model keeps arrays in variables or attributes, and several in what Flax knows to have some",
                    fix=f"self.{key} = nnx.data(...), or nnx.List([nnx.Param(...), ...]) if they are trained",
                )


def _where(path: tuple, key: str) -> str:
    return "/".join(map(str, (*path, key)))


def _is_own(value: Any) -> bool:
    """Returns whether a value has arrays of its own: a variable, or a module within this one."""
    return isinstance(value, nnx.Variable | nnx.Module)
