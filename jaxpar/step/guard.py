"""A step that guards: where its numbers are not finite, or its loss too high, it changes nothing.

Decided inside the compiled program, so that no host waits for a loss before it starts the next step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.step.state import State


def are_finite(params: Any) -> jax.Array:
    """Returns whether all numbers of all arrays are finite: one pass over them, one bool."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]).all()


def guarded(update: Callable, on_device: Callable, told: Callable) -> Callable:
    """Returns a step's update that takes nothing where loss, gradients or the new parameters are not finite.

    Nor where the loss is too high. Between devices one bool travels, of the parameters that each of them holds.

    Args:
      update: (state, batch) to (state, metrics).
      on_device: Brings an optimizer state to where updates are made.
      told: The metrics of `update` as scalars.

    Returns:
      (state, batch, limit) to (state, metrics); `skipped` in the metrics, bool, is true where all but the count of
      steps is as before, bit for bit.
    """

    def _update(state: State, batch: Mapping, limit: jax.Array):
        new, metrics = update(state, batch)
        scalars = told(metrics)
        loss, norm = scalars["loss"], scalars["grad_norm"]
        good = jnp.isfinite(loss) & jnp.isfinite(norm) & (loss <= limit) & are_finite(new.params)
        params, optimizer, model_state, exchange = jax.tree.map(
            lambda after, before: jnp.where(good, after, before),
            (new.params, new.optimizer, new.model_state, new.exchange),
            (state.params, on_device(state.optimizer), state.model_state, state.exchange),
        )
        return State(new.step, params, optimizer, model_state, exchange), metrics | {"skipped": ~good}

    return _update
