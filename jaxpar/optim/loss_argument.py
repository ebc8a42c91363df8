"""Passes the loss of the batch to optimizers that need it, in addition to gradients, state and parameters.

    optax.contrib.reduce_on_plateau, momo, polyak_sgd      update(gradients, state, params, value=loss)
    optax.contrib.sam                                      update(gradients, state, params), no `value`

A chain that takes extra arguments receives the loss, unless a transformation in it rejects the argument. A chain that
does not read it compiles to the same program. No chain receives a loss function or per-example gradients.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import optax

from jaxpar.errors import refuse

PLATEAU = "reduce_on_plateau"  # a transformation in form, but acts as a schedule that follows the loss
NOT_TAKEN = "unexpected keyword argument 'value'"
NEEDED = "keyword-only argument: 'value'"
MISSING = re.compile(r"grad_fn must be provided|missing \d+ required keyword-only argument")


def update(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: jax.Array | None
) -> tuple[Any, Any]:
    """Calls the chain's update, with the loss if the chain takes it; returns updates and the new state.

    Args:
      optimizer: The chain.
      gradients: Gradients of the loss.
      state: State of the chain.
      params: The parameters.
      loss: The mean loss of the batch; None if it is not available at the update.
    """
    if loss is not None and isinstance(optimizer, optax.GradientTransformationExtraArgs):
        try:
            return optimizer.update(gradients, state, params, value=loss)
        except TypeError as error:  # optax.chain and its like accept any name, and only then a member rejects one
            if NOT_TAKEN not in str(error):
                raise
    return optimizer.update(gradients, state, params)


@contextmanager
def explain_missing_arguments() -> Iterator[None]:
    """Refuses a chain that needs more than gradients, state, parameters and the loss.

    Raises:
      JaxparError: If the chain needs more.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not MISSING.search(str(error)):
            raise
        if NEEDED in str(error):
            raise refuse(
                f"the optimizer's update: {error}; and another transformation of the chain has no argument `value`",
                rule="a chain passes `value`, the loss, to all of its transformations, or to none",
                fix="wrap the one that does not take it: optax.GradientTransformation(member.init, member.update)",
            ) from error
        raise refuse(
            f"the optimizer's update: {error}",
            rule="an update receives gradients, state, parameters and `value`, the loss, but no function for it",
            fix="opaque_mode=False for optax.contrib.sam; a learning rate instead of a line search: optax.adamw(3e-4)",
        ) from error


def rate_follows_steps(state: Any) -> bool:
    """Whether the learning rate of a chain depends only on the step.

    Args:
      state: The state of the chain, or its shapes.
    """
    exceptions = (optax.MultiStepsState, optax.contrib.ReduceLROnPlateauState)
    is_exception = lambda node: isinstance(node, exceptions)  # noqa: E731
    return not any(map(is_exception, jax.tree.leaves(state, is_leaf=is_exception)))
