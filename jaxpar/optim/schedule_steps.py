"""Makes schedules count steps, even if a step makes several updates.

    step      0                     1
    updates   0  1  2  ...  U - 1   U  U + 1  ...
    rate      that of step 0        that of step 1

Optax counts the calls of a chain. Asynchronous updates (without a pipeline flush) call it after every microbatch or
two, so a warm-up or decay would end after 1/U of a run. Instead, schedules are paused during a step and advance by one
at its end. So the learning rates are the same as with a flush, and a run can continue with one. Other counts, such as
that of Adam's bias correction, still count updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.schedules import InjectStatefulHyperparamsState

_COUNTS = (optax.ScaleByScheduleState, InjectStatefulHyperparamsState, optax.contrib.ScheduleFreeState)


def pause_schedules(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Wraps a chain so that its updates do not advance its schedules.

    It pauses the counts of optax's `scale_by_schedule` (which optax's optimizers use for `learning_rate=schedule`),
    of `inject_hyperparams`, and of `schedule_free`, whose count weights its average.
    """

    def update(updates: optax.Updates, state: optax.OptState, params: optax.Params | None = None) -> tuple[Any, Any]:
        updates, new = optimizer.update(updates, state, params)
        return updates, _map_counts(lambda _, before: before, new, state)

    return optax.GradientTransformation(optimizer.init, update)


def advance_schedules(state: optax.OptState) -> Any:
    """Advances the schedules in the state of a chain by one step."""

    def one(count):
        return count + 1 if jnp.issubdtype(count.dtype, jnp.integer) else count

    return _map_counts(one, state)


def has_schedules(state: Any) -> bool:
    """Whether the state of a chain, or its shapes, contains schedules that can be paused."""
    is_counted = lambda node: isinstance(node, _COUNTS)  # noqa: E731
    return any(map(is_counted, jax.tree.leaves(state, is_leaf=is_counted)))


def _map_counts(change: Callable, *states: Any) -> Any:
    """Applies `change` to each schedule count of the first state, and the same counts of the other states."""

    def one(*nodes: Any) -> Any:
        first = nodes[0]
        if isinstance(first, optax.ScaleByScheduleState):
            return jax.tree.map(change, *nodes)
        if isinstance(first, optax.contrib.ScheduleFreeState):
            return first._replace(
                step_count=change(*(state.step_count for state in nodes)),
                base_optimizer_state=_map_counts(change, *(state.base_optimizer_state for state in nodes)),
            )
        if not isinstance(first, InjectStatefulHyperparamsState):
            return first
        return first._replace(
            count=change(*(state.count for state in nodes)),
            hyperparams_states=jax.tree.map(change, *(state.hyperparams_states for state in nodes)),
            inner_state=_map_counts(change, *(state.inner_state for state in nodes)),
        )

    return jax.tree.map(one, *states, is_leaf=lambda node: isinstance(node, _COUNTS))
