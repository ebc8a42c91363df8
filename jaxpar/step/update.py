"""The update of a state by one batch: gradients, the optimizer, the guard, and the sync round that ends a step."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import jax
import optax

from jaxpar.optim.eval_params import eval_arrays, eval_params
from jaxpar.sharding.names import Tree
from jaxpar.step.gradients import Gradients
from jaxpar.step.guard import guard_update
from jaxpar.step.losses import Sums
from jaxpar.step.state import State

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

    def plain(state: State, batch: Batch) -> tuple[State, dict[str, jax.Array]]:
        return gradients.update(optimizer, state, batch, load)

    update = guard_update(plain, load, gradients.scalar_metrics) if guard else plain

    @cache
    def program(sync_round: int) -> Any:
        def synchronized(state: State, batch: Batch, *limit: jax.Array):
            state, metrics = update(state, batch, *limit)
            return gradients.synchronize(state, metrics, sync_round)

        return jax.jit(synchronized if sync_round else update, donate_argnums=0, out_shardings=(shardings, None))

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
