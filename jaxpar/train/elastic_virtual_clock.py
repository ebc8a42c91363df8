"""Asynchronous elastic averaging (EASGD) on a virtual clock: a table lists local steps and syncs. *Simulated*.

    gradient at the worker's parameters ─► if it syncs: worker and center move towards each other ─► update

Losses and parameters are those of a real asynchronous run with this table; times come from the table. Each worker has
its own parameters, optimizer state and model state. All run one after the other on the devices of one worker.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse
from jaxpar.exchange.clock.elastic import LocalStep
from jaxpar.optim.eval_params import eval_arrays
from jaxpar.step.init_state import init_state
from jaxpar.step.state import State, fold_in_number
from jaxpar.step.step import Step


def run(
    step: Step,
    table: Sequence[LocalStep],
    alpha: float,
    examples: Callable[[int], Mapping[str, Any]],
    told: Callable[[LocalStep, float], None],
    *,
    seed: int = 0,
) -> State:
    """Returns the state after all steps: the center's parameters, and the rest of the last worker's state.

    Args:
      step: A step with one worker's layout, which computes the gradients.
      table: Local steps in the order in which they begin.
      alpha: Fraction of their difference by which the worker and the center each move at a sync.
      examples: Returns the batch of a share, given its number.
      told: Called after every local step with its mean loss.
      seed: Seed of the initial parameters.

    Raises:
      JaxparError: If evaluation uses parameters from the optimizer's state, as with schedule_free.
    """
    state = init_state(step.layout, step.optimizer, seed=seed)
    if eval_arrays(state.optimizer):
        raise refuse(
            "a virtual clock with an optimizer that computes other parameters for evaluation, such as schedule_free",
            rule="here each worker has its own optimizer state, and the center's parameters are evaluated",
            fix="an optimizer whose trained parameters are evaluated, such as adamw",
        )
    names = sorted({each.worker for each in table})
    workers = {
        name: replace(
            state, model_state=fold_in_number(state.model_state, jnp.uint32(name)) if names[1:] else state.model_state
        )
        for name in names
    }
    center = state.params

    @jax.jit
    def meet(params: Any, center: Any) -> tuple[Any, Any]:
        way = jax.tree.map(lambda x, c: alpha * (x - c), params, center)
        return jax.tree.map(jnp.subtract, params, way), jax.tree.map(jnp.add, center, way)

    @jax.jit
    def update(params: Any, optimizer: Any, gradients: Any) -> tuple[Any, Any]:
        changes, optimizer = step.optimizer.update(gradients, optimizer, params)
        return optax.apply_updates(params, changes), optimizer  # pyright: ignore[reportReturnType]

    for each in table:
        state = workers[each.worker]
        tree, sums, model_state = step.compute_gradients(state.params, state.model_state, examples(each.share))
        total, count = sums["loss"]
        params = state.params
        if each.meets:
            params, center = meet(params, center)
        params, optimizer = update(params, state.optimizer, tree)
        state = replace(state, params=params, optimizer=optimizer, model_state=model_state)
        workers[each.worker] = state
        told(each, float(total) / max(float(count), 1e-30))
    return replace(state, params=center)
