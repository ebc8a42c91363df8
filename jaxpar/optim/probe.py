"""Traces an optimizer or schedule of optax or the user on abstract arrays, to refuse it before a step fails."""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse, user_code_errors
from jaxpar.optim.eval_params import eval_arrays
from jaxpar.optim.loss_argument import update
from jaxpar.optim.optax_lookup import ALONE, TYPES
from jaxpar.optim.optimizer import Optimizer

LOSS = jax.ShapeDtypeStruct((), jnp.float32)
SMALL = {"matrix": jax.ShapeDtypeStruct((3, 4), jnp.float32), "vector": jax.ShapeDtypeStruct((4,), jnp.float32)}


def check_chain(optimizer: optax.GradientTransformation, spec: Optimizer, params: Any) -> Any:
    """Traces a chain with gradients, parameters and the loss; returns its state as shapes.

    Args:
      optimizer: The chain.
      spec: The settings it was built from.
      params: A tree of parameters as shapes, such as `SMALL`.

    Raises:
      JaxparError: If its update cannot be traced, or two transformations define one parameter to evaluate.
    """
    subject = f'optimizer.name = "{spec.name}"'
    arguments_text = f" with {spec.arguments!r:.200}" if spec.arguments else ""
    with user_code_errors(f"{subject}{arguments_text}: its update", rule=ALONE, fix=TYPES):
        state = jax.eval_shape(optimizer.init, params)
        updates, _ = jax.eval_shape(partial(update_with_loss, optimizer), params, state, params, LOSS)
    eval_arrays(state)  # raises if two parts define one
    if jax.tree.map(jnp.shape, updates) != jax.tree.map(jnp.shape, params):
        raise refuse(f"{subject}: updates of other shapes", rule="one update per parameter", fix="optax.apply_updates")
    return state


def update_with_loss(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: Any
) -> tuple[Any, Any]:
    """Calls a chain's update, with the loss if the chain takes it; returns updates and state."""
    return update(optimizer, gradients, state, params, loss)


def needs_loss(optimizer: optax.GradientTransformation, params: Any = SMALL) -> bool:
    """Whether the updates of a valid chain depend on the loss."""
    state = jax.eval_shape(optimizer.init, params)
    closed = jax.make_jaxpr(partial(update_with_loss, optimizer))(params, state, params, LOSS)
    loss = closed.jaxpr.invars[-1]
    return any(loss in eqn.invars for eqn in closed.jaxpr.eqns)


def check_rate(schedule: Callable, *, name: str) -> None:
    """Refuses a schedule that is not a function of the step, or whose rate is not a number.

    Raises:
      JaxparError: If it cannot be traced, or returns anything else.
    """
    got, rule = f'optimizer.schedule.name = "{name}"', "a schedule is a function of the step to a rate, as optax's are"
    with user_code_errors(got, rule=rule, fix="jnp.where instead of if"):
        shape = jax.eval_shape(lambda count: jnp.asarray(schedule(count), jnp.float32), jnp.int32(0)).shape
    if shape:
        raise refuse(f"{got}: rates of shape {list(shape)}", rule=rule, fix="one number")
