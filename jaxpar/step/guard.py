"""Guarded updates: if numbers are not finite, or the loss is too high, the step changes nothing.

The compiled program decides, so that the host need not wait for a loss before it starts the next step.
"""

from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.step.state import State


def are_finite(params: Any) -> jax.Array:
    """Whether all numbers of all arrays are finite. Shape [], bool."""
    return jnp.stack([jnp.all(jnp.isfinite(leaf)) for leaf in jax.tree.leaves(params)]).all()


def guard_update(update: Callable, on_device: Callable, scalar_metrics: Callable) -> Callable:
    """Returns an update that is skipped if the loss, the gradients or the new parameters are not finite.

    It is also skipped if the loss is above the limit. Devices exchange one bool about their shards of the parameters.

    Args:
      update: (state, batch) to (state, metrics).
      on_device: Moves an optimizer state to device memory.
      scalar_metrics: Converts the metrics of `update` to scalars.

    Returns:
      (state, batch, limit) to (state, metrics). If the bool `skipped` in the metrics is true, all but the step count is
      unchanged, bit for bit.
    """

    def _update(state: State, batch: Mapping, limit: jax.Array):
        new_state, metrics = update(state, batch)
        scalars = scalar_metrics(metrics)
        loss, norm = scalars["loss"], scalars["grad_norm"]
        is_valid = jnp.isfinite(loss) & jnp.isfinite(norm) & (loss <= limit) & are_finite(new_state.params)
        params, optimizer, model_state, exchange = jax.tree.map(
            lambda new, old: jnp.where(is_valid, new, old),
            (new_state.params, new_state.optimizer, new_state.model_state, new_state.exchange),
            (state.params, on_device(state.optimizer), state.model_state, state.exchange),
        )
        return State(new_state.step, params, optimizer, model_state, exchange), metrics | {"skipped": ~is_valid}

    return _update
