"""A loss of (model, batch, key): the same numbers on any layout, others in every step, microbatch and seed."""

import math
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax import lax
from pairwise import some

import jaxpar as jp
from jaxpar.job.build import assemble
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.step.stochastic_loss import key_parameter, with_key

jp.simulate(8)

ROWS, DIM, LAYERS = 16, 8, 4
ONE = {}
LAYOUTS = {
    "data 8": {"data": 8},
    "fsdp 8, zero 2": {"fsdp": 8, "zero": 2},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}
BATCH = {"x": np.random.default_rng(0).random([ROWS, DIM], np.float32)}


class Stack(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        names = ("layers", "embed", "mlp")
        start = jax.random.normal(rngs.params(), (LAYERS, DIM, DIM)) / DIM
        self.kernels = nnx.Param(start, out_sharding=names)

    def __call__(self, x, key):
        x = x + jax.random.normal(key, x.shape)

        def layers(x, kernels):
            return lax.scan(lambda x, kernel: (x + jnp.tanh(x @ kernel), None), x, kernels)[0]

        return jp.pipelined(lambda x: layers(x, self.kernels[...]), x)


def noisy(model, batch, key):
    """Says what it drew, in whole numbers that a sum over microbatches keeps exactly."""
    noise, drawn = jax.random.split(key)
    bits = jax.random.randint(drawn, (ROWS,), 0, 2**16).sum().astype(jnp.float32)
    squares = (model(batch["x"], noise) - batch["x"]) ** 2
    return {"loss": (squares.sum(), jnp.float32(len(squares))), "drawn": (bits, jnp.float32(1))}


@cache
def run(sizes, *, seed=0, pipeline=None, **numerics):
    """Returns the losses of two steps, what they drew, and two evaluations' draws."""
    pieces = {"pipeline": jp.Pipeline(**dict(pipeline))} if pipeline else {}
    layout = jp.compose(Stack, jp.Parallel(**dict(sizes), **pieces), jax.devices()[: math.prod(dict(sizes).values())])
    step = jp.train_step(layout, noisy, optax.sgd(0.1), seed=seed, **numerics)
    state, rows, evaluated = jp.init_state(layout, optax.sgd(0.1)), [], []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        rows.append((float(metrics["loss"]), float(metrics["drawn"])))
        evaluated.append(float(step.evaluate(state, BATCH)["drawn"][0]))
    losses, drawn = zip(*rows, strict=True)
    return losses, drawn, evaluated


def of(sizes):
    return tuple(sizes.items())


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", some(LAYOUTS.values(), [LAYOUTS["2x2x2"]]), ids=LAYOUTS)
def test_every_layout_draws_what_one_device_does(sizes):
    losses, *drawn = run(of(sizes))
    expected, *reference = run(of(ONE))
    assert drawn == reference
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


@pytest.mark.nightly
def test_microbatches_of_a_pipeline_draw_what_accumulated_ones_do():
    pipe = run(of({"pipe": 2}), pipeline=of({"microbatches": 2}))
    losses, drawn, _ = run(of(ONE), accumulate=2)
    assert pipe[1] == drawn != run(of(ONE))[1]
    np.testing.assert_allclose(pipe[0], losses, rtol=1e-6)


@pytest.mark.nightly
def test_steps_and_seeds_draw_other_numbers_and_evaluations_the_same():
    _, (first, second), evaluated = run(of(ONE))
    assert first != second
    assert first != run(of(ONE), seed=1)[1][0]
    assert evaluated[0] == evaluated[1] != first


@pytest.mark.slow
def test_a_step_draws_by_its_number_so_that_a_run_goes_on_as_if_it_had_not_ended():
    layout = jp.compose(Stack, jp.Parallel(data=8))
    step, again = (jp.train_step(layout, noisy, optax.sgd(0.1)) for _ in range(2))
    state, _ = step(jp.init_state(layout, optax.sgd(0.1)), BATCH)
    state, metrics = again(state, BATCH)
    assert float(metrics["drawn"]) == run(of(LAYOUTS["data 8"]))[1][1]


@pytest.mark.parametrize(
    ("loss", "wanted"),
    [
        (lambda model, batch: 0, None),
        (lambda model, batch, weight=0.5: 0, None),
        (lambda model, batch, *, key: 0, "key"),
        (lambda model, batch, weight=0.5, key=None: 0, "key"),
        (lambda model, batch, z_rng: 0, "z_rng"),
        (lambda model, batch, z_rng, /: 0, "z_rng"),
        (jp.next_token_loss, None),
    ],
)
def test_a_loss_that_wants_a_key_is_known_by_its_signature(loss, wanted):
    found = key_parameter(loss)
    assert (found and found.name) == wanted


def test_a_key_is_given_by_the_name_that_the_loss_has_for_it():
    assert with_key(lambda model, batch, z_rng, /: (model, batch, z_rng), 3)(1, 2) == (1, 2, 3)
    assert with_key(lambda model, batch, weight=0.5, *, key: (weight, key), 3)(1, 2) == (0.5, 3)


batches = [BATCH] * 2
JOB = """
[mesh]
simulate = 8
[parallel]
data = 8
[model]
name = "test_stochastic_losses:Stack"
[data]
source = "test_stochastic_losses:batches"
[optimizer]
name = "sgd"
[train]
steps = 2
global_batch = 16
loss = "test_stochastic_losses:noisy"
seed = 1
"""


@pytest.mark.nightly
def test_a_job_gives_its_loss_keys_of_its_seed():
    job = loads(JOB, allow_import=True)
    assert not check(job)
    step = assemble(job, jax.devices())
    _, metrics = step(jp.init_state(step.layout, step.optimizer, seed=1), BATCH)
    assert float(metrics["drawn"]) == run(of(LAYOUTS["data 8"]), seed=1)[1][0]
