"""The learning rate of a step is what the log says of it, however many updates a stage makes in that step.

Four microbatches on two stages make 4 updates a step (stash) or 2 (2bw). Whoever counts updates where steps are meant
is through with a warm-up and a decay over the run after a fourth or half of it.
"""

import jax
import numpy as np
import optax
import pytest
from pairwise import some

import jaxpar as jp
from jaxpar.job.build import build
from jaxpar.job.file.parse import loads
from jaxpar.job.parts.models import resolve_loss

JOB = """
[mesh]
devices = 2
[parallel]
pipe = 2
[parallel.pipeline]
schedule = "1f1b"
microbatches = 4
weights = "flush"
[model]
name = "decoder"
vocab = 256
layers = 2
dim = 16
heads = 2
[data]
source = "text"
path = "pyproject.toml"
seq = 8
[optimizer]
name = "sgd"
learning_rate = 0.5
warmup = 2
decay = "cosine"
final = 0.0
beta1 = 0.0
clip = 0.0
[train]
steps = 6
global_batch = 8
"""
UPDATES = {"stash": 4, "vertical": 4, "2bw": 2, "none": 4, "flush": 1}


@pytest.fixture
def job(tmp_path):
    return lambda weights: build(loads(JOB, [f"parallel.pipeline.weights={weights}", f"run.dir={tmp_path}"]))


def told(built):
    """Returns (step, optimizer) of the same job whose learning rate is a number in the state, to be set by hand."""
    optimizer = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)
    return jp.train_step(built.layout, resolve_loss(built.job), optimizer), optimizer


def at_rate(state, rate):
    before = state.optimizer.hyperparams["learning_rate"]
    state.optimizer.hyperparams["learning_rate"] = jax.device_put(np.float32(rate), before.sharding)
    return state


def arrays(state):
    return jax.tree.leaves(jax.device_get(state.params))


@pytest.mark.spread(0)
@pytest.mark.parametrize("weights", some(["stash", "2bw"], [], ["2bw"]))
def test_every_update_of_a_step_has_the_rate_that_the_log_gives_the_step(weights, job):
    built = job(weights)
    step, optimizer = told(built)
    state, other = jp.init_state(built.layout, built.optimizer), jp.init_state(built.layout, optimizer)
    for index in range(built.job.train.steps):
        batch, before = built.source.batch(index, 8), arrays(state)
        state, _ = built.step(state, batch)
        other, _ = step(at_rate(other, built.learning_rate(index)), batch)
        for mine, theirs in zip(arrays(state), arrays(other), strict=True):
            np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)
        moved = any((a != b).any() for a, b in zip(before, arrays(state), strict=True))
        assert moved == (index > 0)  # the warm-up begins with 0; then every step has a rate


@pytest.mark.nightly
def test_a_run_without_a_flush_goes_on_with_one_at_the_rate_of_its_step(job):
    built, after = job("stash"), job("flush")
    step, optimizer = told(after)
    state, other = jp.init_state(built.layout, built.optimizer), jp.init_state(after.layout, optimizer)
    for index in range(3):
        state, _ = built.step(state, built.source.batch(index, 8))
    other = type(other)(other.step, jax.tree.map(jax.numpy.copy, state.params), other.optimizer, other.model_state)
    batch = built.source.batch(3, 8)
    state, _ = after.step(state, batch)
    other, _ = step(at_rate(other, after.learning_rate(3)), batch)
    for mine, theirs in zip(arrays(state), arrays(other), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.nightly
def test_a_schedule_in_a_users_chain_counts_steps_too(job):
    built = job("stash")
    injected = optax.inject_hyperparams(optax.adam)(learning_rate=optax.linear_schedule(0.0, 1e-2, 4))
    step, state = jp.train_step(built.layout, resolve_loss(built.job), injected), jp.init_state(built.layout, injected)
    for index in range(3):
        state, _ = step(state, built.source.batch(index, 8))
        assert float(state.optimizer.hyperparams["learning_rate"]) == np.float32(index * 1e-2 / 4)
    assert int(state.optimizer.inner_state[0].count) == 3 * UPDATES["stash"]


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("weights", some(UPDATES, ["flush"]))
def test_a_layout_knows_its_updates_and_says_so(weights, job):
    layout = job(weights).layout
    assert layout.parallel.pipeline.updates(layout.schedule) == UPDATES[weights]
    assert (f"{UPDATES[weights]} updates a step" in layout.summary()) == (weights != "flush")
