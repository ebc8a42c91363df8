"""Evaluation on what is held out: each example once, whatever the loss function, the layout and the batch size.

Losses of users know nothing of how the last batch is filled up; tokens may come as arrays.
"""

import io
import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from pairwise import some
from tiny import DIM, SEQ, VOCAB, Staged

import jaxpar as jp
from jaxpar.data.arrays import Arrays
from jaxpar.data.iterables import UserSource
from jaxpar.job import run as job_run
from jaxpar.job.file.parse import loads
from jaxpar.train import loop
from jaxpar.train.feed import Feed
from jaxpar.train.run import Run

TOKENS = """
[parallel]
data = 8
[model]
layers = 1
dim = 32
heads = 2
vocab = 64
seq = 16
[data]
source = "arrays"
path = "{path}"
held_out = 0.2
[train]
steps = 2
global_batch = 8
"""


class Scale(nnx.Module):
    def __init__(self, rngs):
        self.scale = nnx.Param(jnp.ones(DIM))

    def __call__(self, x):
        return x * self.scale[...]


def own_loss(model, batch):
    """The mean of a number per example, as a user writes it: no mask."""
    values = jnp.mean(model(batch["inputs"]), axis=-1)
    return {"loss": (jnp.sum(values), values.size), "hits": (jnp.sum(values > 0.05), values.size)}


def mean_loss(model, batch):
    return jnp.mean(model(batch["inputs"]))


def token_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return jnp.sum(losses * batch["counts"]), jnp.sum(batch["counts"])


def scores(source, model, loss, parallel, size, **numerics):
    layout = jp.compose(model, parallel)
    step = jp.train_step(layout, loss, optax.sgd(0.1), **numerics)
    job = Run(step=step, source=source, steps=1, global_batch=size)
    return loop.evaluate(job, jp.init_state(layout, optax.sgd(0.1)), Feed(source, layout, size))


def rows(count):
    """Returns a source that holds every second of 2 x count examples out, and these."""
    values = np.random.default_rng(count).random((2 * count, DIM)).astype(np.float32) ** 8
    source = Arrays({"inputs": values}, jp.Data(source="arrays", path="x.npz", held_out=0.5), seed=0)
    return source, values[source.held_out_indices].astype(np.float64)


@pytest.mark.parametrize("loss", [own_loss, mean_loss])
@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.slow),
        pytest.param(31, marks=pytest.mark.slow),
        pytest.param(48, marks=pytest.mark.slow),
        pytest.param(80, marks=pytest.mark.slow),
        97,
    ],
)
def test_an_own_loss_counts_each_held_out_example_once(loss, count):
    source, values = rows(count)
    found = scores(source, Scale, loss, jp.Parallel(data=2, fsdp=4, zero=3), 48)
    assert found["eval_loss"] == pytest.approx(values.mean(), rel=1e-6)
    if loss is own_loss:
        assert found["eval_hits"] == pytest.approx((values.mean(axis=-1) > 0.05).mean(), rel=1e-6)


LAYOUTS = {
    "data 8": (jp.Parallel(data=8), {}),
    "data 4, accumulate": (jp.Parallel(data=4), {"accumulate": 3}),
    "pipe 2 x fsdp 2": (jp.Parallel(pipe=2, fsdp=2, pipeline=jp.Pipeline(microbatches=4)), {}),
}


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(LAYOUTS, ["data 4, accumulate"]))
def test_a_loss_with_its_own_mask_is_evaluated_as_on_one_device(name):
    parallel, numerics = LAYOUTS[name]
    devices = parallel.pipe * parallel.data * parallel.fsdp
    rng = np.random.default_rng(0)
    tokens = rng.integers(0, VOCAB, (82, SEQ + 1)).astype(np.int32)
    counts = (rng.random((82, SEQ)) < 0.6).astype(np.float32)
    arrays = {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "counts": counts}
    source = Arrays(arrays, jp.Data(source="arrays", path="x.npz", held_out=0.5), seed=0)
    layout = jp.compose(Staged, parallel, jax.devices()[:devices])
    step = jp.train_step(layout, token_loss, optax.sgd(0.1), **numerics)
    job = Run(step=step, source=source, steps=1, global_batch=24)
    found = loop.evaluate(job, jp.init_state(layout, optax.sgd(0.1), seed=1), Feed(source, layout, 24))
    alone = jp.compose(Staged, jp.Parallel(), jax.devices()[:1])
    whole = {key: value[source.held_out_indices] for key, value in arrays.items()}
    assert len(whole["counts"]) == 41
    total, count = jp.train_step(alone, token_loss, optax.sgd(0.1)).evaluate(
        jp.init_state(alone, optax.sgd(0.1), seed=1), whole
    )["loss"]
    assert found["eval_loss"] == pytest.approx(float(total) / float(count), rel=2e-6)


@given(count=st.integers(0, 64), size=st.integers(1, 64), ways=st.integers(1, 4), seed=st.integers(0, 9))
@settings(max_examples=200, deadline=None)
def test_weighted_sums_are_those_of_each_example_once(count, size, ways, seed):
    from jaxpar.data.text import weighted_batches

    count = min(count, size)
    values = np.random.default_rng(seed).random(count)

    def read(at):
        return {"inputs": values[at]}

    batches = weighted_batches(count, size, None, read)
    assert all(len(each.batch["inputs"]) == size for each in batches)
    assert sum(each.weight * each.batch["inputs"].sum() for each in batches) == pytest.approx(values.sum())
    assert sum(each.weight * size for each in batches) == pytest.approx(count)
    parts = [weighted_batches(count, size, part, read) for part in np.array_split(np.arange(size), ways)]
    for index, each in enumerate(batches):
        assert np.array_equal(each.batch["inputs"], np.concatenate([part[index].batch["inputs"] for part in parts]))


@pytest.mark.nightly
def test_tokens_as_arrays_are_evaluated_by_the_default_loss(tmp_path):
    tokens = np.random.default_rng(0).integers(0, 64, (60, 17))
    np.savez(tmp_path / "tokens.npz", inputs=tokens[:, :-1], targets=tokens[:, 1:])
    job = loads(TOKENS.format(path=tmp_path / "tokens.npz"), [f"run.dir={tmp_path / 'run'}"])
    job_run.train(job, stream=io.StringIO())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert 3 < rows[-1]["eval_loss"] < 6


def test_an_own_source_may_end_its_evaluation_with_fewer_examples():
    values = np.random.default_rng(0).random((20, DIM)).astype(np.float32)

    class Mine:
        def batch(self, step, size):
            return {"inputs": values[:size]}

        def evaluation(self, index, size):
            left = values[index * size : (index + 1) * size]
            return {"inputs": left} if len(left) else None

    found = scores(UserSource(Mine(), "mine"), Scale, own_loss, jp.Parallel(data=8), 16)
    assert found["eval_loss"] == pytest.approx(values.astype(np.float64).mean(), rel=1e-6)


def test_held_out_batches_have_the_arrays_of_the_data_and_no_others(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 50)
    source = jp.open_data(jp.Data(source="text", path=str(tmp_path / "a.txt"), seq=8, held_out=0.1), tmp_path / "d")
    trained, (held, *_) = source.batch(0, 8), source.evaluation(0, 8)
    assert held.batch.keys() == trained.keys()
