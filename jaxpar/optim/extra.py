"""What some optimizers ask for besides gradients, state and parameters: the loss of the batch.

    optax.contrib.reduce_on_plateau, momo, polyak_sgd      update(gradients, state, params, value=loss)
    optax.contrib.sam                                      update(gradients, state, params), no `value`

A chain that takes extra arguments is given it, unless a member of it has no argument of that name. A chain that does
not read it has the same program. A function of the loss or gradients of each example are given to none.
"""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import optax

from jaxpar.errors import refuse

PLATEAU = "reduce_on_plateau"  # follows the loss from step to step, and is a schedule in all but its form
NOT_TAKEN = "unexpected keyword argument 'value'"
NEEDED = "keyword-only argument: 'value'"
MISSING = re.compile(r"grad_fn must be provided|missing \d+ required keyword-only argument")


def update(
    optimizer: optax.GradientTransformation, gradients: Any, state: Any, params: Any, loss: jax.Array | None
) -> tuple[Any, Any]:
    """Returns updates and the state after them, of a chain that is given the loss where it takes one.

    Args:
      optimizer: The chain.
      gradients: Of the loss.
      state: Of the chain.
      params: The parameters.
      loss: The mean loss of the batch that the gradients are of; None where there is none at the update.
    """
    if loss is not None and isinstance(optimizer, optax.GradientTransformationExtraArgs):
        try:
            return optimizer.update(gradients, state, params, value=loss)
        except TypeError as error:  # optax.chain and its like take all names, and only then a member refuses one
            if NOT_TAKEN not in str(error):
                raise
    return optimizer.update(gradients, state, params)


@contextmanager
def refusing_what_is_missing() -> Iterator[None]:
    """Refuses a chain that needs more than gradients, state, parameters and the loss.

    Raises:
      JaxparError: With a chain that does not.
    """
    try:
        yield
    except (TypeError, ValueError) as error:
        if not MISSING.search(str(error)):
            raise
        if NEEDED in str(error):
            raise refuse(
                f"the optimizer's update: {error}; and another member of the chain has no argument `value`",
                rule="a chain gives `value`, the loss, to all of its members, or to none",
                fix="optax.GradientTransformation(member.init, member.update) of the one that does not take it",
            ) from error
        raise refuse(
            f"the optimizer's update: {error}",
            rule="an update has gradients, state, parameters and `value`, the loss; no function that computes it again",
            fix="opaque_mode=False of optax.contrib.sam; in place of a line search a learning rate, optax.adamw(3e-4)",
        ) from error


def follows_steps(state: Any) -> bool:
    """Returns whether the rate of a chain is what its schedule says of the number of the step.

    Args:
      state: The state of the chain; its shapes will do.
    """
    others = (optax.MultiStepsState, optax.contrib.ReduceLROnPlateauState)
    is_other = lambda node: isinstance(node, others)  # noqa: E731
    return not any(map(is_other, jax.tree.leaves(state, is_leaf=is_other)))
