"""A run's memory does not grow with its steps."""

import gc
import tracemalloc
from types import SimpleNamespace

import jax.numpy as jnp
import pytest

from jaxpar.train import loop, metrics

FIRST = 500  # steps until all that is kept for long is there


class Counted(SimpleNamespace):
    """A state of which only the step is asked."""


@pytest.mark.parametrize(
    "steps", [pytest.param(5_000, marks=pytest.mark.slow), pytest.param(100_000, marks=pytest.mark.full)]
)
def test_memory_is_flat_over_all_steps(tmp_path, steps):
    """With a step that computes nothing, so that only what the loop keeps of it is seen."""
    numbers = {name: jnp.float32(1.0) for name in ("loss", "grad_norm", "tokens")}
    seen = []

    def step(state, batch, *, limit):
        if state.step in (FIRST, FIRST + steps):
            gc.collect()
            seen.append(tracemalloc.get_traced_memory()[0])
        return Counted(step=state.step + 1), numbers

    step.layout, step.loss = None, lambda model, batch: None
    step.gradients = SimpleNamespace(evaluation_metrics=dict)
    step.evaluate = lambda state, batch: {}
    log = metrics.Log(tmp_path, start=0)
    source = SimpleNamespace(batch=lambda index, size: {}, evaluation=lambda index, size: None)
    job = loop.Run(
        step=step, source=source, steps=FIRST + steps + 2, global_batch=1, log=log, learning_rate=lambda step: 0.1
    )
    tracemalloc.start()
    try:
        outcome = loop.run(job, Counted(step=0))
    finally:
        tracemalloc.stop()
        log.close()
    assert outcome.last["step"] == FIRST + steps + 2
    assert seen[1] - seen[0] < 64 * 1024
