"""A run keeps the state of its newest good step, whatever the user's data, loggers and evaluations raise."""

import json
import signal

import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.errors import JaxparError
from jaxpar.train.run import Best

RNG = np.random.default_rng(0)
BATCHES = [{name: RNG.normal(size=[8, 4]).astype(np.float32) for name in "xy"} for _ in range(30)]


class Net(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(4, 4, rngs=rngs)

    def __call__(self, x):
        return self.linear(x)


def squares(model, batch):
    error = (model(batch["x"]) - batch["y"]) ** 2
    return error.sum(), error.size


def new_step(loss=squares, **parallel):
    return jp.train_step(jp.compose(Net, jp.Parallel(**{"data": 8} | parallel)), loss, optax.sgd(0.05))


def by_hand(steps):
    """Returns the kernel after so many steps of a plain loop."""
    import jax

    def loss(kernel, bias, batch):
        return jnp.mean((batch["x"] @ kernel + bias - batch["y"]) ** 2)

    state = jp.init_state(new_step().layout, optax.sgd(0.05)).params["linear"]
    kernel, bias = np.asarray(state["kernel"]), np.asarray(state["bias"])
    for batch in BATCHES[:steps]:
        gradient = jax.grad(loss, (0, 1))(kernel, bias, batch)
        kernel, bias = kernel - 0.05 * gradient[0], bias - 0.05 * gradient[1]
    return kernel


def kernel_of(run, step):
    return np.asarray(jp.restore(run, new_step(), at=step).params["linear"]["kernel"])


def rows(run):
    return [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]


def ends():
    yield from BATCHES[:6]


def ends_with_an_odd_batch():
    yield from BATCHES[:6]
    yield {name: value[:5] for name, value in BATCHES[6].items()}


def ends_with_another_key():
    yield from BATCHES[:6]
    yield {"x": BATCHES[6]["x"]}


def raises():
    yield from BATCHES[:6]
    raise ConnectionError("502")


class Indexed:
    def batch(self, step, size):
        return BATCHES[:6][step]


@pytest.mark.nightly
@pytest.mark.parametrize(
    "data",
    [
        pytest.param(ends, marks=pytest.mark.slow),
        pytest.param(ends_with_an_odd_batch, marks=pytest.mark.slow),
        pytest.param(ends_with_another_key, marks=pytest.mark.slow),
        raises,
        pytest.param(Indexed(), marks=pytest.mark.slow),
    ],
)
def test_steps_are_saved_before_what_data_raise(data, tmp_path, capsys):
    with pytest.raises(JaxparError):
        jp.fit(new_step(), data, steps=20, batch=8, run=tmp_path / "run")
    assert "step 6 is saved before the error below" in capsys.readouterr().out
    assert Store(tmp_path / "run" / "checkpoints", Checkpoints()).steps() == [6]
    assert rows(tmp_path / "run") == [1, 2, 3, 4, 5, 6]
    np.testing.assert_allclose(kernel_of(tmp_path / "run", 6), by_hand(6), rtol=1e-5)


def test_the_same_run_goes_on_once_its_data_do(tmp_path):
    run = tmp_path / "run"
    with pytest.raises(JaxparError):
        jp.fit(new_step(), ends, steps=20, batch=8, run=run)
    (run / "run.json").unlink()  # another iterable is other data
    jp.fit(new_step(), BATCHES, steps=20, batch=8, run=run)
    assert rows(run) == [*range(1, 21)]
    np.testing.assert_allclose(kernel_of(run, 20), by_hand(20), rtol=1e-5)


class Evaluated:
    """Its held-out examples cannot be read."""

    begun = False

    def batch(self, step, size):
        self.begun = True
        return BATCHES[step]

    def evaluation(self, index, size):
        if self.begun:
            raise OSError("held-out")
        return BATCHES[29]


def test_a_step_is_saved_before_what_its_evaluation_raises(tmp_path):
    with pytest.raises((JaxparError, OSError)):
        jp.fit(new_step(), Evaluated(), steps=20, batch=8, eval_every=4, run=tmp_path / "run")
    assert Store(tmp_path / "run" / "checkpoints", Checkpoints()).steps() == [4]


class Failing:
    def __init__(self):
        self.seen, self.closed = [], False

    def log(self, step, values):
        self.seen.append(step)
        if step in (3, 7):
            raise ConnectionError("502")

    def close(self):
        self.closed = True
        raise SystemExit(3)


def test_a_logger_that_raises_is_said_and_training_goes_on(tmp_path, capsys):
    logger = Failing()
    outcome = jp.fit(new_step(), BATCHES, steps=9, batch=8, run=tmp_path / "run", loggers=[logger])
    assert int(outcome.state.step) == 9
    assert logger.seen == [*range(1, 10)]
    assert logger.closed
    out = capsys.readouterr().out
    assert out.count("ConnectionError: 502") == 1
    assert "training goes on" in out
    assert "Failing raised 3 times" in out


def test_a_bad_step_before_the_error_is_not_saved(tmp_path):
    def spoilt():
        yield from BATCHES[:5]
        yield {name: value * np.float32(1e30) for name, value in BATCHES[5].items()}

    with pytest.raises(JaxparError, match="loss of step 6 is inf"):
        jp.fit(new_step(), spoilt, steps=20, batch=8, run=tmp_path / "run")
    assert Store(tmp_path / "run" / "checkpoints", Checkpoints()).steps() == []


class Scored:
    """Batches whose evaluations get better until step 14, and worse after it."""

    def __init__(self, stop_at=None, number=signal.SIGTERM):
        self.stop_at, self.number, self.evaluations, self.step = stop_at, number, 0, 0

    def batch(self, step, size):
        self.step = step + 1
        sign = 1 if step < 8 else -1
        return BATCHES[step] | {"y": sign * BATCHES[step]["x"]}

    def evaluation(self, index, size):
        if index == 0 and self.step:  # jp.fit asks for one before it begins
            self.evaluations += 1
            if self.evaluations == self.stop_at:
                signal.raise_signal(self.number)
        return BATCHES[29] | {"y": BATCHES[29]["x"]} if index < 2 else None


def evaluations(run):
    read = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    return {row["step"]: row["eval_loss"] for row in read if "eval_loss" in row}


def fit_scored(run, data):
    best = Best(patience=2)
    saved = Checkpoints(keep_best=1, keep_last=1, every=0, minutes=0)
    return jp.fit(new_step(), data, steps=30, batch=8, eval_every=2, run=run, checkpoints=saved, best=best)


def steps_of(run):
    return Store(run / "checkpoints", Checkpoints()).steps()


def test_the_best_evaluation_is_saved_when_it_is_found(tmp_path):
    fit_scored(tmp_path, Scored())
    assert steps_of(tmp_path) == [14, 18]
    assert min(evaluations(tmp_path), key=evaluations(tmp_path).get) == 14


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize(
    "stop_at",
    [
        pytest.param(1, marks=pytest.mark.slow),
        pytest.param(7, marks=pytest.mark.slow),
        pytest.param(8, marks=pytest.mark.slow),
        9,
    ],
)
def test_an_evaluation_that_a_signal_breaks_off_is_made_when_the_run_goes_on(stop_at, number, tmp_path):
    fit_scored(tmp_path / "undisturbed", Scored())
    run = tmp_path / "stopped"
    outcome = fit_scored(run, Scored(stop_at, number))
    assert outcome.stopped_by == signal.Signals(number).name
    assert int(outcome.state.step) == 2 * stop_at
    fit_scored(run, Scored())
    assert evaluations(run) == evaluations(tmp_path / "undisturbed")
    assert steps_of(run) == steps_of(tmp_path / "undisturbed")
    assert rows(run) == rows(tmp_path / "undisturbed")


def test_a_run_that_ends_by_patience_fails_where_its_last_save_does(tmp_path, monkeypatch):
    from jaxpar.checkpoint import manifest

    write = manifest.write

    def broken(folder, *, step, **more):
        if step == 18:
            raise OSError(5, "Input/output error")
        return write(folder, step=step, **more)

    monkeypatch.setattr(manifest, "write", broken)
    with pytest.raises(JaxparError, match="step 18 is not saved"):
        fit_scored(tmp_path, Scored())
