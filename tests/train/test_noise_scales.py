"""Noise scales: the temperature of updates, and the noise of gradients beside closed forms."""

import functools
import io
import json
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar import train_step
from jaxpar.errors import JaxparError
from jaxpar.inspector.compiled import compile_program
from jaxpar.job.check import check
from jaxpar.job.file.parse import load, loads
from jaxpar.job.run import train
from jaxpar.step.numerics import Numerics
from jaxpar.step.per_replica.part_norms import part_norm_function
from jaxpar.train.noise import GradientNoise, estimate, temperature

DIM, BATCH = 16, 32
MEAN, SPREAD = np.linspace(-0.2, 0.3, DIM), np.linspace(0.5, 1.5, DIM)  # of one example's gradient


class Linear(nnx.Module):
    """Its loss is a product with the parameters, so that the gradient of an example is the example."""

    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros(DIM))

    def __call__(self, x):
        return x @ self.w[...]


def loss(model, batch):
    return jnp.sum(model(batch["x"]) * batch["mask"]), jnp.sum(batch["mask"])


def plain(model, batch):
    return jnp.sum(model(batch["x"])), batch["x"].shape[0]


def keyed(model, batch, key):
    noise = jax.random.normal(key, batch["x"].shape)
    return jnp.sum(model(batch["x"] + noise)), batch["x"].shape[0]


def examples(*shape, seed=0):
    drawn = np.random.default_rng(seed).normal(size=(*shape, DIM))
    return (MEAN + SPREAD * drawn).astype(np.float32)


def batch(seed=0, masked=False):
    mask = np.arange(BATCH) % 5 > 1 if masked else np.ones(BATCH)  # parts count unequally
    return {"x": examples(BATCH, seed=seed), "mask": mask.astype(np.float32)}


@functools.cache
def made(loss=loss, accumulate=1, optimizer=None, **sizes):
    layout = jp.compose(lambda rngs: Linear(rngs), jp.Parallel(**sizes), jax.devices()[: math.prod(sizes.values())])
    step = train_step(layout, loss, optax.sgd(0.0), accumulate=accumulate)
    return step, jp.init_state(layout, step.optimizer)


def test_both_estimates_are_unbiased():
    """Of 20,000 batches of 32 examples in 4 parts, whose gradients have this mean and these variances."""
    parts = examples(20_000, 4, 8).mean(axis=2)
    small, big = (np.sqrt(np.square(parts).sum(-1).mean(1)), np.linalg.norm(parts.mean(1), axis=-1))
    found = estimate(small, big, batch=32, parts=4)  # pyright: ignore
    for each, true in ((found.signal, np.sum(MEAN**2)), (found.trace, np.sum(SPREAD**2))):
        error = each.std() / np.sqrt(len(each))
        assert abs(each.mean() - true) < 3 * error
        assert error < 0.02 * true
    naive = np.mean(big**2)
    assert naive > 2 * np.sum(MEAN**2)  # which is what the norm of the whole gradient would say


@pytest.mark.parametrize(
    ("sizes", "accumulate", "parts"),
    [
        pytest.param(dict(data=4), 1, 4, marks=pytest.mark.slow),
        (dict(data=2, fsdp=2), 2, 2),
        pytest.param(dict(fsdp=4), 1, 2, marks=pytest.mark.slow),
        (dict(tensor=1), 4, 4),
    ],
    ids=["data", "data x fsdp, accumulate", "fsdp", "accumulate"],
)
def test_the_norm_of_parts_is_that_of_their_gradients(sizes, accumulate, parts):
    step, state = made(accumulate=accumulate, **sizes)
    assert step.parts == parts
    given = batch(masked=True)
    weighed = given["x"] * given["mask"][:, None]
    own = weighed.reshape(parts, -1, DIM) if "data" in sizes else weighed.reshape(-1, parts, DIM).swapaxes(0, 1)
    gradients = own.sum(1) / (given["mask"].sum() / parts)
    np.testing.assert_allclose(step.part_norm(state, given), np.sqrt(np.square(gradients).sum(-1).mean()), rtol=1e-5)


@pytest.mark.parametrize("sizes", [dict(data=4), dict(data=1)], ids=str)
def test_a_loss_that_draws_draws_for_each_part(sizes):
    """Else what parts have in common would be taken for the true gradient."""
    step, state = made(keyed, accumulate=4 // sizes["data"], **sizes)

    def square(x):
        return 4 * float(step.part_norm(state, {"x": x})) ** 2

    nothing, drawn = np.zeros((4, BATCH // 4, DIM), np.float32), []
    for part in range(4):
        x = nothing.copy()
        x[part, :, 0] = 1  # (1 + drawn)^2 where it was drawn^2
        rows = x if sizes["data"] > 1 else x.swapaxes(0, 1)
        drawn.append((square(rows.reshape(BATCH, DIM)) - square(nothing.reshape(BATCH, DIM)) - 1) / 2)
    assert np.std(drawn) > 0.1  # each the mean of 8 normal numbers


def test_on_gpus_one_scalar_travels_between_replicas_and_no_gradient():
    layout = jp.compose(lambda rngs: Linear(rngs), jp.Parallel(data=8), jp.target_devices("h100:1x8"))
    step = train_step(layout, plain, optax.sgd(0.1))
    shapes = {name: step.placement.shape_struct(name, value) for name, value in batch().items()}
    state = step.abstract()

    def sent(loss):
        with jax.set_mesh(layout.device_mesh):
            measuring = jax.jit(part_norm_function(layout, loss, Numerics()))
            lowered = measuring.lower(state.params, state.model_state, shapes)
        text = compile_program(
            lowered, list(layout.device_mesh.devices.flat), compiler_options=step.compiler.options
        ).text
        return re.findall(r"= (.+?) all-reduce(?:-start)?\(", text), collectives(text)

    assert sent(plain) == (["f32[]"], 1)
    assert sent(loss) == (["f32[2]{0}"], 1)  # and what counts: a mask may leave one part more than another


def collectives(text):
    """Returns how many collectives of any kind a program has."""
    kinds = "all-reduce|all-gather|reduce-scatter|all-to-all|collective-permute"
    return len(re.findall(rf" (?:{kinds})(?:-start)?\(", text))


# temperature


def test_a_temperature_is_that_of_the_source():
    assert temperature(0.1, momentum=0.0, examples=50_000, batch=128) == pytest.approx(0.1 * (50_000 / 128 - 1))
    assert temperature(0.1, momentum=0.9, examples=50_000, batch=128) == pytest.approx(50_000 / 128 - 1)
    assert temperature(0.1, momentum=0.9, examples=128, batch=128) == 0
    down, up = (temperature(r, momentum=0.9, examples=50_000, batch=b) for r, b in ((0.02, 64), (0.1, 320)))
    assert up == pytest.approx(down, rel=0.01)  # "decay" and "grow"


# runs


JOB = """
[mesh]
simulate = 8
[parallel]
data = 8
[model]
name = "mlp"
inputs = 64
hidden = 16
[data]
source = "digits"
[optimizer]
name = "sgd"
beta1 = 0.5
learning_rate = 0.1
decay = "constant"
[train]
loss = "classify"
steps = 12
global_batch = 32
[checkpoint]
every = 6
[metrics]
noise_every = 3
"""


def rows(folder):
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{key: value for key, value in row.items() if "second" not in key} for row in found]


@pytest.mark.nightly
def test_a_run_says_its_noise_and_trains_as_without(tmp_path):
    job, outs, results = tmp_path / "job.toml", [], []
    job.write_text(JOB)
    for name, more in (("without", "metrics.noise_every=0"), ("with", "train.steps=6"), ("with", "train.steps=12")):
        out = io.StringIO()
        results.append(train(load(job, [f"run.dir={tmp_path / name}", more]), stream=out))
        outs.append(out.getvalue().splitlines())
    without, noisy = rows(tmp_path / "without"), rows(tmp_path / "with")
    assert [row["loss"] for row in noisy] == [row["loss"] for row in without]
    measured = [row for row in noisy if "noise_scale" in row]
    assert [row["step"] for row in measured] == [3, 6, 9, 12]
    smoothed = None
    for row in measured:  # also over the stop after step 6
        smoothed = estimate(row["part_grad_norm"], row["grad_norm"], batch=32, parts=8).smoothed_with(smoothed)
        assert (row["noise_signal"], row["noise_trace"]) == (smoothed.signal, smoothed.trace)
        assert row["noise_temperature"] == pytest.approx(0.1 / (1 - 0.5) * ((1797 - 1797 // 50) / 32 - 1))
    suggested = results[-1]["suggested_batch"]
    assert suggested % 8 == 0
    assert abs(suggested - measured[-1]["noise_scale"]) <= 4
    assert f"suggested train.global_batch = {suggested} (it is 32)" in outs[-1][-1]
    assert results[0]["suggested_batch"] is None
    assert "noise scale" not in "".join(outs[0])


def read_text(overrides):
    try:
        return loads(JOB, overrides), []
    except JaxparError as error:
        return None, error.problems


def test_noise_that_hides_every_gradient_suggests_no_number():
    assert GradientNoise(signal=-1e-3, trace=2.0).scale == math.inf
    assert GradientNoise(signal=1e-3, trace=-2.0).scale == 0


@pytest.mark.parametrize(
    ("overrides", "got", "fix"),
    [
        (["metrics.noise_every=-1"], "metrics.noise_every = -1", "0"),
        (["parallel.data=1", "parallel.fsdp=8", "train.global_batch=8"], "a batch of 8 examples over 8", "= 16"),
        (['parallel.exchange.name="local"', "parallel.exchange.every=2"], "with exchange", "no exchange"),
        (
            ['parallel.exchange.name="sign"', "parallel.exchange.smallest=64", "parallel.exchange.block=32"],
            "with exchange",
            "no exchange",
        ),
        (["parallel.data=4", "parallel.pipe=2"], "pipe=2", "pipe=1"),
    ],
)
def test_noise_that_cannot_be_measured_is_refused_in_one_message(overrides, got, fix):
    job, problems = read_text(overrides)
    (problem,) = problems or check(job)
    assert got in problem.got
    assert fix in problem.fix
