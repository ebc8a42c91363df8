"""The update of a state by one batch: gradients, the optimizer, the guard, and the sync round that ends a step."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.optim.eval_params import eval_arrays, eval_params
from jaxpar.sharding.names import Tree
from jaxpar.step.gradients import Gradients
from jaxpar.step.losses import Sums
from jaxpar.step.numerics import are_finite
from jaxpar.step.state import State

# Guarded updates: if numbers are not finite, or the loss is too high, the step changes nothing.


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


Batch = Mapping[str, Any]


def optimizer_loader(shardings: State, *, offload: bool) -> Callable[..., Any]:
    """Returns a function of (optimizer state, its shardings) that moves the state to device memory.

    The shardings default to those of the whole optimizer state. Without `offload` the function is the identity.
    """

    def load(optimizer: Any, placed: Any = None) -> Any:
        if not offload:
            return optimizer
        placed = shardings.optimizer if placed is None else placed
        return jax.tree.map(lambda x, s: jax.device_put(x, s.with_memory_kind("device")), optimizer, placed)

    return load


def update_programs(
    gradients: Gradients,
    optimizer: optax.GradientTransformation,
    shardings: State,
    load: Callable[..., Any],
    *,
    guard: bool,
) -> Callable[[int], Any]:
    """Returns a function from a sync round (0 for none) to the jitted update whose step ends with it.

    An update is a function of (state, batch), or of (state, batch, limit of the loss) if it is guarded. It reuses the
    buffers of the state.
    """

    def update(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        return gradients.update(optimizer, state, batch, load)

    whole_update = guard_update(update, load, gradients.scalar_metrics) if guard else update

    @cache
    def program(sync_round: int) -> Any:
        def synchronized(state: State, batch: Batch, *limit: jax.Array):
            state, metrics = whole_update(state, batch, *limit)
            return gradients.synchronize(state, metrics, sync_round)

        return jax.jit(synchronized if sync_round else whole_update, donate_argnums=0, out_shardings=(shardings, None))

    return program


def evaluation_program(gradients: Gradients, shardings: State, load: Callable[..., Any]) -> Any:
    """Returns the jitted evaluation of a batch, without dropout or an update.

    It is a function of (params, model state, batch, arrays of the optimizer that the evaluated parameters are computed
    from or None, state of the exchange).
    """

    def measure(params: Tree, model_state: Tree, batch: Batch, averages: Any = None, exchange: Tree = ()) -> Sums:
        if averages is not None:
            averaged = eval_params(load(averages, eval_arrays(shardings.optimizer)), params)
            params = jax.lax.with_sharding_constraint(averaged, shardings.params)  # computed where they are stored
        return gradients.evaluate(*gradients.global_model(params, model_state, exchange), batch)

    return jax.jit(measure)
