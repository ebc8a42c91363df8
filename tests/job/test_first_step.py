"""To the first step: a model is traced and compiled as often as it must be, and no more."""

from collections import Counter

import jax
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx

import jaxpar as jp

jp.simulate(8)

COUNTS: Counter[str] = Counter()
COMPILED: list[str] = []
BATCH = {"inputs": np.zeros([8, 16], np.float32), "labels": np.arange(8, dtype=np.int32)}


class Linen(nn.Module):
    @nn.compact
    def __call__(self, x):
        COUNTS["call"] += 1
        return nn.Dense(8)(nn.relu(nn.Dense(32)(x)))


class Nnx(nnx.Module):
    def __init__(self, *, rngs):
        COUNTS["made"] += 1
        self.up, self.down = nnx.Linear(16, 32, rngs=rngs), nnx.Linear(32, 8, rngs=rngs)

    def __call__(self, x):
        COUNTS["call"] += 1
        return self.down(nnx.relu(self.up(x)))


def note(event: str, _: float, fun_name: str = "", **__) -> None:
    if event.endswith("backend_compile_duration"):
        COMPILED.append(fun_name.removeprefix("jit").strip("_()"))


jax.monitoring.register_event_duration_secs_listener(note)


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "counts"),
    [
        # to make its variables, for what it does with them, in the step
        pytest.param(
            lambda: jp.from_linen(Linen(), BATCH["inputs"][:1]), {"call": 3}, id="linen", marks=pytest.mark.slow
        ),
        # for the shapes and metadata of its variables, to make them; and in the step
        pytest.param(lambda: Nnx, {"made": 2, "call": 1}, id="nnx"),
    ],
)
def test_the_first_step_traces_a_model_no_more_than_it_must(model, counts):
    jax.block_until_ready(jax.random.key(0))  # of the state: a program of JAX's own
    COUNTS.clear(), COMPILED.clear()
    layout = jp.compose(model(), jp.Parallel(data=2, fsdp=2, tensor=2))
    optimizer = optax.sgd(0.1)
    step = jp.train_step(layout, jp.classification_loss, optimizer)
    _, metrics = step(jp.init_state(layout, optimizer), BATCH)
    assert np.isfinite(metrics["loss"])
    assert COUNTS == counts
    assert COMPILED == ["init", "update"]
