"""Tries an optimizer or a schedule that is not jaxpar's own, on shapes: what a step cannot use is refused before it."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse, users_code
from jaxpar.optim.eval_params import held_for
from jaxpar.optim.extra import update
from jaxpar.optim.named import ALONE, TYPES
from jaxpar.optim.optimizer import Optimizer

LOSS = jax.ShapeDtypeStruct((), jnp.float32)
SMALL = {"matrix": jax.ShapeDtypeStruct((3, 4), jnp.float32), "vector": jax.ShapeDtypeStruct((4,), jnp.float32)}


def check_chain(made: optax.GradientTransformation, spec: Optimizer, params: Any) -> Any:
    """Returns the state, as shapes, of a chain that needs no more than gradients, parameters and the loss.

    Args:
      made: The chain.
      spec: The settings that it is made of.
      params: A tree of parameters as shapes, on which it is traced, such as `SMALL`.

    Raises:
      JaxparError: If its update cannot be traced, or two of its parts say what a parameter is evaluated as.
    """
    said = f'optimizer.name = "{spec.name}"'
    with_them = f" with {spec.arguments!r:.200}" if spec.arguments else ""
    with users_code(f"{said}{with_them}: its update", rule=ALONE, fix=TYPES):
        state = jax.eval_shape(made.init, params)
        updates, _ = jax.eval_shape(partial(updated, made), params, state, params, LOSS)
    held_for(state)  # refuses two of them
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise refuse(f"{said}: updates of other shapes", rule="one update per parameter", fix="optax.apply_updates")
    return state


def updated(made: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: Any) -> tuple[Any, Any]:
    """Returns updates and the state after them, of a chain that is given the loss if it takes any."""
    return update(made, gradients, state, params, loss)


def needs_loss(made: optax.GradientTransformation, params: Any = SMALL) -> bool:
    """Returns whether the updates of a chain, which is sound, depend on the loss."""
    state = jax.eval_shape(made.init, params)
    closed = jax.make_jaxpr(partial(updated, made))(params, state, params, LOSS)
    loss = closed.jaxpr.invars[-1]
    return any(loss in eqn.invars for eqn in closed.jaxpr.eqns)


def check_rate(schedule: Callable, *, name: str) -> None:
    """Refuses a schedule that is no function of the step, or whose rate is no number.

    Raises:
      JaxparError: If it cannot be traced, or says something else.
    """
    said, rule = f'optimizer.schedule.name = "{name}"', "a schedule is a function of the step to a rate, as optax's are"
    with users_code(said, rule=rule, fix="jnp.where in the place of if"):
        shape = jax.eval_shape(lambda count: jnp.asarray(schedule(count), jnp.float32), jnp.int32(0)).shape
    if shape:
        raise refuse(f"{said}: rates of shape {list(shape)}", rule=rule, fix="one number")
