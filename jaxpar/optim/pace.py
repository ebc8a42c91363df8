"""Schedules count steps, also where a step makes several updates.

    step      0                     1
    updates   0  1  2  ...  U - 1   U  U + 1  ...
    rate      that of step 0        that of step 1

Optax counts how often a chain is called. Without a flush that is after every microbatch or two, so that a warm-up or a
decay over a run would be over after 1/U of it. Therefore schedules stand still while the table of a step runs, and go
on by one at its end: a run has the rates that it would have with a flush, and its state can go on with one. What else
is counted, such as Adam's correction of its means, counts updates.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from optax.schedules import InjectStatefulHyperparamsState

_COUNTS = (optax.ScaleByScheduleState, InjectStatefulHyperparamsState, optax.contrib.ScheduleFreeState)


def standing(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """Returns the chain, with schedules that stand still: each call leaves them as they were.

    These are optax's own: `scale_by_schedule`, which is what `learning_rate=schedule` becomes in its optimizers,
    `inject_hyperparams`, and what `schedule_free` counts by to weigh its average.
    """

    def update(updates: Any, state: Any, params: Any = None) -> tuple[Any, Any]:
        updates, new = optimizer.update(updates, state, params)
        return updates, _mapped(lambda _, before: before, new, state)

    return optax.GradientTransformation(optimizer.init, update)


def advanced(state: Any) -> Any:
    """Returns the state of a chain whose schedules have gone on by one step."""

    def one(count):
        return count + 1 if jnp.issubdtype(count.dtype, jnp.integer) else count

    return _mapped(one, state)


def counts_steps(state: Any) -> bool:
    """Returns whether schedules are in the state of a chain that can stand still; its shapes will do."""
    known = lambda node: isinstance(node, _COUNTS)  # noqa: E731
    return any(map(known, jax.tree.leaves(state, is_leaf=known)))


def _mapped(change: Callable, *states: Any) -> Any:
    """Returns the first of these states with what its schedules count changed; the others are given to `change` too."""

    def one(*each: Any) -> Any:
        first = each[0]
        if isinstance(first, optax.ScaleByScheduleState):
            return jax.tree.map(change, *each)
        if isinstance(first, optax.contrib.ScheduleFreeState):
            return first._replace(
                step_count=change(*(state.step_count for state in each)),
                base_optimizer_state=_mapped(change, *(state.base_optimizer_state for state in each)),
            )
        if not isinstance(first, InjectStatefulHyperparamsState):
            return first
        return first._replace(
            count=change(*(state.count for state in each)),
            hyperparams_states=jax.tree.map(change, *(state.hyperparams_states for state in each)),
            inner_state=_mapped(change, *(state.inner_state for state in each)),
        )

    return jax.tree.map(one, *states, is_leaf=lambda node: isinstance(node, _COUNTS))
