"""Hogwild!: threads really race on shared parameters, and sparse problems converge nevertheless."""

import threading

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.train.hogwild import race

FEATURES, ACTIVE, ROWS = 2_000, 4, 6_000
RNG = np.random.default_rng(0)
INDICES = RNG.integers(0, FEATURES, (ROWS, ACTIVE))
VALUES = RNG.normal(size=(ROWS, ACTIVE)).astype(np.float32)
WEIGHTS = RNG.normal(size=FEATURES).astype(np.float32)
TARGETS = (VALUES * WEIGHTS[INDICES]).sum(1)


class Sparse(nnx.Module):
    """A linear model of a few active features in many, such as words of a text."""

    def __init__(self, rngs):
        self.weights = nnx.Param(jnp.zeros(FEATURES))

    def __call__(self, indices, values):
        return (self.weights[...][indices] * values).sum(-1)


def squares(model, batch):
    error = (model(batch["indices"], batch["values"]) - batch["targets"]) ** 2
    return error.sum(), error.size


def example(number, size=1):
    rows = np.random.default_rng(number).integers(0, ROWS, size)
    return {"indices": INDICES[rows], "values": VALUES[rows], "targets": TARGETS[rows]}


@pytest.fixture(scope="module")
def step():
    return jp.train_step(jp.compose(Sparse, jp.Parallel(), jax.devices()[:1]), squares, optax.sgd(0.05))


def test_one_thread_is_sgd(step):
    result = race(step, example, workers=1, updates=50, rate=lambda number: 0.05 / (1 + number))
    weights = np.zeros(FEATURES, np.float32)
    for number in range(50):
        row = {key: value[0] for key, value in example(number).items()}
        error = (row["values"] * weights[row["indices"]]).sum() - row["targets"]
        assert result.loss[number] == pytest.approx(error**2, rel=1e-5)
        np.subtract.at(weights, row["indices"], 0.05 / (1 + number) * 2 * error * row["values"])
    np.testing.assert_allclose(result.state.params["weights"], weights, rtol=1e-5, atol=1e-7)
    assert (result.staleness == 0).all()
    assert (result.worker == 0).all()
    assert (result.write_share <= ACTIVE / FEATURES).all()  # of an example only its own features are written


@pytest.mark.nightly
def test_threads_race_and_sparse_least_squares_converges(step):
    """The paper's claim: with few elements in common, lost and late writes do not keep SGD from the minimum, here 0."""
    result = race(step, lambda number: example(number, 16), workers=4, updates=3000, rate=0.8)
    assert set(result.worker) == {0, 1, 2, 3}
    assert result.staleness.max() > 0
    assert result.loss[:100].mean() > 1
    assert result.loss[-100:].mean() < 0.05
    assert len(result.loss) == 3000


def test_nobody_waits_between_reading_and_writing(step):
    """All threads have read before any has written: a lock around an update would leave the barrier waiting."""
    barrier = threading.Barrier(4)

    def meet(number):
        if threading.current_thread() is not threading.main_thread():  # which compiles
            barrier.wait(30)
        return example(number)

    result = race(step, meet, workers=4, updates=4, rate=0.05)
    assert list(result.staleness) == [0, 1, 2, 3]  # all have read version 0


def test_an_exception_in_a_thread_ends_all(step):
    def broken(number):
        if number == 20:
            raise ZeroDivisionError("the data end")
        return example(number)

    with pytest.raises(ZeroDivisionError, match="the data end"):
        race(step, broken, workers=3, updates=10**6, rate=0.05)


def test_state_of_the_model_and_frozen_parameters():
    class Normed(nnx.Module):
        def __init__(self, rngs):
            self.inner, self.norm = nnx.Linear(4, 8, rngs=rngs), nnx.BatchNorm(8, rngs=rngs)
            self.outer = nnx.Linear(8, 1, rngs=rngs)

        def __call__(self, x):
            return self.outer(nnx.relu(self.norm(self.inner(x))))

    chain = optax.multi_transform(
        {"train": optax.sgd(0.1), "freeze": optax.set_to_zero()},
        lambda params: jax.tree_util.tree_map_with_path(
            lambda keys, _: "freeze" if "inner" in str(keys) else "train", params
        ),
    )
    data = {"x": RNG.normal(size=(32, 4)).astype(np.float32)}
    data["y"] = np.sin(data["x"].sum(1, keepdims=True))
    step = jp.train_step(
        jp.compose(Normed, jp.Parallel(), jax.devices()[:1]),
        lambda model, batch: (jnp.sum((model(batch["x"]) - batch["y"]) ** 2), 32),
        chain,
    )
    begun = jp.init_state(step.layout, chain)
    result = race(step, lambda number: data, workers=2, updates=60, rate=0.05)
    assert result.loss[-1] < 0.8 * result.loss[0]
    assert not np.allclose(result.state.model_state["norm"]["mean"], begun.model_state["norm"]["mean"])


@pytest.mark.parametrize(
    ("devices", "settings", "message"),
    [
        (2, {}, "Hogwild! on 2 x cpu"),
        (1, {"workers": 0}, "workers = 0"),
        (1, {"updates": 0}, "updates = 0"),
    ],
)
def test_what_cannot_race_is_refused(devices, settings, message):
    step = jp.train_step(
        jp.compose(Sparse, jp.Parallel(data=devices), jax.devices()[:devices]), squares, optax.sgd(0.05)
    )
    with pytest.raises(JaxparError) as caught:
        race(step, example, **{"workers": 2, "updates": 2, "rate": 0.1, **settings})
    assert message in str(caught.value)


JOB = """
[model]
name = "mlp"
layers = 1
dim = 16
hidden = 16
inputs = 8
classes = 4
[data]
source = "arrays"
path = "rows.npz"
held_out = 0.2
[optimizer]
name = "sgd"
beta1 = 0.0
clip = 0.0
learning_rate = 0.1
[train]
loss = "classify"
steps = 40
global_batch = 8
eval_batches = 2
"""


@pytest.mark.slow
def test_the_verb_prints_a_row_for_each_number_of_threads(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "job.toml").write_text(JOB)
    inputs = RNG.normal(size=(120, 8)).astype(np.float32)
    np.savez("rows.npz", inputs=inputs, labels=inputs[:, :4].argmax(1))
    assert main(["exchange", "hogwild", "job.toml", "--workers", "1,3"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["threads", "1", "3"]
    assert all(float(line.split()[2]) < 1.5 for line in lines[1:])
    assert main(["exchange", "hogwild", "job.toml", "optimizer.name=adamw", "optimizer.clip=1.0"]) == 1
    message = capsys.readouterr().err
    assert "optimizer.name = 'adamw' with Hogwild!" in message
    assert "optimizer.clip=0.0 as an override" in message
    assert main(["exchange", "hogwild", "job.toml", "--workers", "two"]) == 1
    assert "--workers two" in capsys.readouterr().err
