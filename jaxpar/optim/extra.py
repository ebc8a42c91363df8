"""What some optimizers ask for besides gradients, state and parameters: the loss of the batch.

    optax.contrib.reduce_on_plateau, momo, polyak_sgd      update(gradients, state, params, value=loss)

Every chain that takes extra arguments is given it: what does not read it has the same program. A function of the loss
or gradients of each example are given to none.
"""

from typing import Any

import jax
import optax

PLATEAU = "reduce_on_plateau"  # follows the loss from step to step, and is a schedule in all but its form


def given(optimizer: optax.GradientTransformation, loss: jax.Array | None) -> dict[str, Any]:
    """Returns the extra arguments of an update, by name.

    Args:
      optimizer: The chain.
      loss: The mean loss of the batch that the gradients are of; None where there is none at the update.
    """
    if loss is None or not isinstance(optimizer, optax.GradientTransformationExtraArgs):
        return {}
    return {"value": loss}


def follows_steps(state: Any) -> bool:
    """Returns whether the rate of a chain is what its schedule says of the number of the step.

    Args:
      state: The state of the chain; its shapes will do.
    """
    others = (optax.MultiStepsState, optax.contrib.ReduceLROnPlateauState)
    is_other = lambda node: isinstance(node, others)  # noqa: E731
    return not any(map(is_other, jax.tree.leaves(state, is_leaf=is_other)))
