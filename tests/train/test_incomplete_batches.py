"""Held-out examples that are fewer than a batch, under losses that do not add up over examples.

The oracle is the loss function itself on one device, without copies: on batches of at most the size of a batch.
"""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.data.arrays import Arrays
from jaxpar.data.streams.sets import open_sets
from jaxpar.job import run as job_run
from jaxpar.job.file.parse import loads
from jaxpar.train import loop
from jaxpar.train.feed import Feed
from jaxpar.train.run import Run

SIZE, DIM = 16, 4


class Net(nnx.Module):
    def __init__(self, rngs):
        self.dense = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        return self.dense(x)


def unit(x):
    return x / jnp.linalg.norm(x, axis=-1, keepdims=True)


def clip(model, batch):
    scores = 5 * unit(model(batch["x"])) @ unit(batch["y"]).T
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores)))
    return jnp.sum(losses), losses.size


def mean_clip(model, batch):
    total, count = clip(model, batch)
    return total / count


def simclr(model, batch):
    both = unit(jnp.concatenate([model(batch["x"]), model(batch["y"])]))
    scores = jnp.where(jnp.eye(len(both), dtype=bool), -1e9, both @ both.T / 0.2)
    labels = jnp.roll(jnp.arange(len(both)), len(both) // 2)
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, labels)
    return {"loss": (jnp.sum(losses), losses.size), "norm": (jnp.sum(batch["x"] ** 2), batch["x"].size)}


def ranking(model, batch):
    scores, wanted = model(batch["x"])[:, 0], batch["y"][:, 0]
    worse = wanted[:, None] > wanted[None]
    losses = jnp.where(worse, jax.nn.softplus(scores[None] - scores[:, None]), 0.0)
    return jnp.sum(losses), jnp.maximum(jnp.sum(worse), 1)


def hard_negatives(model, batch):
    far = jnp.sum((model(batch["x"])[:, None] - batch["y"][None]) ** 2, axis=-1)
    nearest = jnp.min(jnp.where(jnp.eye(len(far), dtype=bool), jnp.inf, far), axis=-1)
    return jnp.sum(jax.nn.relu(1 + jnp.diagonal(far) - nearest)), len(far)


def at_least_one(model, batch):
    counts = (batch["y"][:, 0] > 0).astype(jnp.float32)
    return jnp.sum(counts * jnp.sum((model(batch["x"]) - batch["y"]) ** 2, axis=-1)), jnp.maximum(jnp.sum(counts), 1)


def capacity(model, batch):
    """Each of two experts takes a quarter of the batch: the examples after these have no loss."""
    x = model(batch["x"])
    expert = jax.nn.one_hot(jnp.argmax(x[:, :2], axis=-1), 2)
    taken = expert * (jnp.cumsum(expert, axis=0) <= len(x) // 4)
    return jnp.sum(taken * x[:, :2] ** 2), len(x)


def squares(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), batch["x"].size


def mean_squares(model, batch):
    return jnp.mean((model(batch["x"]) - batch["y"]) ** 2)


def examples(count, seed=0):
    values = np.random.default_rng(seed).normal(size=(2, count, DIM)).astype(np.float32)
    values[1, :, 0] = np.where(
        np.arange(count) % SIZE == 0, -1, values[1, :, 0]
    )  # the ones that batches are filled with
    return {"x": values[0], "y": values[1]}


def evaluated(loss, counts, parallel=None, *, rows=None, **numerics):
    """Returns the metrics of sets of so many examples, what was said, the step and the model that was evaluated."""
    layout = jp.compose(Net, parallel or jp.Parallel(data=8), jax.devices()[: 8 if parallel is None else None])
    step = jp.train_step(layout, loss, optax.sgd(0.1), **numerics)
    sets = open_sets({f"n{count}": examples(count, count) for count in counts}, None, SIZE)
    train = Arrays(examples(SIZE), jp.Data(source="arrays", path="x.npz", held_out=0.0), seed=0)
    job = Run(step=step, source=train, steps=1, global_batch=SIZE, sets=sets, progress=Said())
    state, feed = jp.init_state(layout, optax.sgd(0.1)), Feed(train, layout, SIZE)
    feed.rows = rows
    found = loop.evaluate(job, state, feed)
    again = loop.evaluate(job, state, feed)
    assert found == again
    dense = jax.device_get(state.params["dense"])
    return found, job.progress.lines, step, lambda x: x @ dense["kernel"] + dense["bias"]


class Said:
    def __init__(self):
        self.lines = []

    def say(self, text):
        self.lines.append(text)


def plain(loss, model, count, size=SIZE, left_out=0):
    """Returns the means of all entries, over batches of at most so many examples; a mean weighs as it has examples."""
    totals = {}
    data = examples(count, count)
    for begin in range(0, count - left_out, size):
        batch = {name: value[begin : min(begin + size, count - left_out)] for name, value in data.items()}
        value = loss(model, batch)
        share = len(batch["x"]) / size
        entries = value if isinstance(value, dict) else {"loss": value}
        for name, each in entries.items():
            total, number = each if isinstance(each, tuple) else (each * share, share)
            before = totals.get(name, (0.0, 0.0))
            totals[name] = (before[0] + float(total), before[1] + float(number))
    return {name: total / number for name, (total, number) in totals.items()}


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "loss",
    [
        pytest.param(clip, marks=pytest.mark.slow),
        pytest.param(mean_clip, marks=pytest.mark.slow),
        pytest.param(simclr, marks=pytest.mark.full),
        pytest.param(ranking, marks=pytest.mark.slow),
        pytest.param(hard_negatives, marks=pytest.mark.slow),
        at_least_one,
        pytest.param(capacity, marks=pytest.mark.slow),
    ],
)
def test_examples_that_see_each_other_are_evaluated_without_copies(loss):
    found, said, _, model = evaluated(loss, (16, 24, 40))
    for count in (16, 24, 40):
        for name, value in plain(loss, model, count).items():
            assert found[f"eval_n{count}_{name}"] == pytest.approx(value, rel=1e-5), (count, name)
    assert len(said) == 2  # of 24 and of 40, once each
    assert all("does not add up" in line and "a batch of 8" in line for line in said)


@pytest.mark.nightly
@pytest.mark.parametrize("loss", [squares, mean_squares])
def test_a_loss_that_adds_up_compiles_one_program_and_nothing_is_said(loss):
    counts = (2, 9, 11, 16, 17, 24, 27)
    found, said, step, model = evaluated(loss, counts)
    for count in counts:
        assert found[f"eval_n{count}_loss"] == pytest.approx(plain(loss, model, count)["loss"], rel=1e-5)
    assert not said
    assert len(step.programs) == 1


@pytest.mark.nightly
def test_one_example_alone_is_compared_in_batches_of_two_sizes():
    found, said, _, model = evaluated(squares, (1,))
    assert found["eval_n1_loss"] == pytest.approx(plain(squares, model, 1)["loss"], rel=1e-5)
    assert not said
    found, said, _, _ = evaluated(clip, (1,))
    assert found == {}
    assert said == [
        "the loss does not add up over examples, so no copies are subtracted: the last of the held-out examples of n1 "
        "is not evaluated, as the mesh needs a multiple of 8"
    ]


@pytest.mark.slow
@pytest.mark.parametrize("count", [17, 27])
def test_examples_that_the_mesh_does_not_divide_are_left_out_and_said(count):
    found, said, _, model = evaluated(clip, (count,))
    left = (count - 16) % 8
    assert found[f"eval_n{count}_loss"] == pytest.approx(plain(clip, model, count, left_out=left)["loss"], rel=1e-5)
    assert len(said) == 1
    assert "multiple of 8" in said[0]


@pytest.mark.slow
def test_each_process_reads_its_own_rows_of_them():
    found, said, _, model = evaluated(clip, (24,), rows=np.arange(SIZE))
    assert found["eval_n24_loss"] == pytest.approx(plain(clip, model, 24)["loss"], rel=1e-5)
    assert "a batch of 8" in said[0]


@pytest.mark.nightly
def test_microbatches_of_updates_do_not_bound_what_is_evaluated():
    found, said, _, model = evaluated(clip, (20,), jp.Parallel(data=2, fsdp=2, tensor=2), accumulate=4)
    assert found["eval_n20_loss"] == pytest.approx(plain(clip, model, 20)["loss"], rel=1e-5)
    assert "a batch of 4" in said[0]


JOB = """
[parallel]
data = 8
[model]
name = "test_incomplete_batches:Net"
[data]
source = "arrays"
path = "{folder}/train.npz"
held_out = 0.2
sets = {{ held = {{ source = "arrays", path = "{folder}/held.npz" }} }}
[train]
steps = 1
global_batch = 16
loss = "test_incomplete_batches:clip"
[optimizer]
name = "sgd"
learning_rate = 0.0
"""


@pytest.mark.nightly
def test_a_job_says_how_such_examples_are_evaluated(tmp_path):
    np.savez(tmp_path / "train.npz", **examples(120))
    np.savez(tmp_path / "held.npz", **examples(24, 24))
    job = loads(JOB.format(folder=tmp_path), [f"run.dir={tmp_path / 'run'}"])
    out = io.StringIO()
    job_run.train(job, stream=out)
    assert out.getvalue().count("does not add up") == 2  # of 24 held out and of the set
    row = json.loads((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()[-1])
    layout = jp.compose(Net, jp.Parallel(), jax.devices()[:1])
    params = jax.device_get(jp.init_state(layout, optax.sgd(0.1), seed=job.train.seed).params["dense"])
    wanted = plain(clip, lambda x: x @ params["kernel"] + params["bias"], 24)["loss"]
    assert row["eval_held_loss"] == pytest.approx(wanted, rel=1e-5)
