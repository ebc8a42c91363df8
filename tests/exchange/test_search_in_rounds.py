"""Searches in rounds (a genetic algorithm, a particle swarm): each round is trained anew, and its settings follow."""

import json

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.exchange.population.search_rounds import Evolution, SearchSpace, Swarm
from jaxpar.job.file import parse
from jaxpar.job.run import train
from jaxpar.optim.step_inputs import settings

RATES = (1e-3, 3e-3, 1e-2, 0.1, 1.99, 1.9)
RANGE = {
    "values": {"learning_rate": RATES},
    "within": {"learning_rate": (1e-3, 2.0)},
    "logarithmic": ("learning_rate",),
}


class Point(nnx.Module):
    def __init__(self, rngs):
        self.at = nnx.Param(jnp.ones((4,)))


def bowl(model, batch):
    return jnp.sum(model.at[...] ** 2) / 2 * batch["x"].size, batch["x"].size


ADAM = optax.inject_hyperparams(optax.adam)(learning_rate=0.0, b1=0.5)
SGD = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0)


def search(exchange, steps, data=2, chain=ADAM):
    layout = jp.compose(lambda rngs: Point(rngs), jp.Parallel(data=data, exchange=exchange), jax.devices()[:data])
    state, step, rows = jp.init_state(layout, chain), jp.train_step(layout, bowl, chain), []
    for _ in range(steps):
        state, metrics = step(state, {"x": np.ones((2,), np.float32)})
        rows.append(jax.device_get(metrics))
    return state, rows


@pytest.mark.nightly
@pytest.mark.parametrize("kind", [pytest.param(Evolution, marks=pytest.mark.slow), Swarm])
def test_each_round_is_the_training_of_its_settings_from_the_start(kind):
    """Beside optax on one device: parameters and optimizer state of each member, through three rounds."""
    every = 5
    state, rows = search(kind(every=every, **RANGE), 3 * every)
    for first in (0, every, 2 * every):  # the first step of a later round is thrown away
        begin, end = first + (first > 0), first + every
        rates = [rows[end - 1][f"learning_rate/{member}"] for member in range(6)]
        for member, rate in enumerate(rates):
            chain = optax.inject_hyperparams(optax.adam)(learning_rate=rate, b1=0.5)
            at, held = jnp.ones(4), chain.init(jnp.ones(4))
            for number in range(begin, end):
                assert rows[number][f"loss/{member}"] == pytest.approx(float(jnp.sum(at**2) / 2), rel=1e-5)
                changes, held = chain.update(at, held, at)
                at = optax.apply_updates(at, changes)
            if end == 3 * every:
                np.testing.assert_allclose(state.params["at"][member], at, rtol=1e-5)
        if first:
            scored = [rows[begin - 2][f"loss/{member}"] for member in range(6)]  # the last fifth of 5 steps is one
            assert [rows[begin - 1][f"score/{member}"] for member in range(6)] == pytest.approx(scored, rel=1e-6)
    assert rates != list(np.float32(RATES))


def test_a_swarm_moves_as_its_equations_say():
    """Kennedy and Eberhart's velocity in numpy, with the same draws, through rounds in which some get worse."""
    swarm = Swarm(values={"a": (0.1, 0.5, 0.9), "b": (1.0, 2.0, 3.0)}, within={"a": (0.0, 1.0), "b": (0.0, 4.0)})
    x = np.array([[0.1, 0.25], [0.5, 0.5], [0.9, 0.75]], np.float32)
    space = SearchSpace(swarm.within, swarm.logarithmic)
    places = space.coordinates({name: jnp.float32(each) for name, each in swarm.values.items()})
    np.testing.assert_allclose(places, x)
    memory, v, p, best = swarm.remember(places), np.zeros_like(x), x.copy(), np.full(3, np.inf)
    rng = np.random.default_rng(0)
    for number in range(20):
        scores, key = rng.normal(size=3).astype(np.float32), jax.random.key(number)
        scores[number % 3] = np.inf if number % 5 == 4 else scores[number % 3]
        places, memory = swarm.propose(places, jnp.asarray(scores), memory, key)
        for member in range(3):
            if scores[member] < best[member]:
                best[member], p[member] = scores[member], x[member]
        r1, r2 = np.asarray(jax.random.uniform(key, (2, 3, 2)))
        v = 0.7298 * v + 1.49618 * r1 * (p - x) + 1.49618 * r2 * (p[best.argmin()] - x)
        v[(x + v < 0) | (x + v > 1)], x = 0, np.clip(x + v, 0, 1)
        np.testing.assert_allclose(places, x, rtol=1e-4, atol=1e-6)


@pytest.mark.nightly
def test_children_are_of_the_better_and_survivors_stay():
    members = 200
    places = jnp.stack([jnp.linspace(0, 1, members), jnp.linspace(1, 0, members)], 1)
    scores = jnp.abs(places[:, 0] - 0.25).at[7].set(jnp.inf)
    values = {"a": tuple(np.linspace(0, 1, members)), "b": tuple(np.linspace(0, 1, members))}
    evolution = Evolution(values=values, within={"a": (0, 1), "b": (0, 1)}, spread=0.0)
    after, _ = evolution.propose(places, scores, (), jax.random.key(0))
    stays = np.argsort(scores)[:40]  # a fifth
    np.testing.assert_array_equal(np.asarray(after)[stays], np.asarray(places)[stays])
    others = np.setdiff1d(np.arange(members), stays)
    assert np.isin(np.asarray(after)[others], np.asarray(places)).all()  # without mutation every gene is a parent's
    assert (np.abs(after[others].sum(1) - 1) > 1e-3).mean() > 0.3  # of two different parents
    # the better of two by chance has a mean rank of a third, where any has a half
    rank = np.argsort(np.argsort(scores))
    parents = np.searchsorted(np.asarray(places[:, 0]), np.asarray(after)[others, 0])
    assert 0.25 < rank[np.clip(parents, 0, members - 1)].mean() / members < 0.42
    mutated, _ = Evolution(values=values, within={"a": (0, 1), "b": (0, 1)}).propose(
        jnp.full_like(places, 0.5), scores, (), jax.random.key(1)
    )
    assert float(jnp.std(mutated[others])) == pytest.approx(0.1, rel=0.1)
    assert ((mutated >= 0) & (mutated <= 1)).all()


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", [pytest.param(Evolution, marks=pytest.mark.slow), Swarm])
def test_the_search_finds_the_best_rate(kind):
    """SGD in a bowl: after some steps the least loss is at a rate of 1, and members begin at 0.1 and 1.9 at best."""
    _, rows = search(kind(every=6, **RANGE), 90, chain=SGD)
    ends = [(row[f"score/{member}"], rows[number - 1][f"learning_rate/{member}"])
            for number, row in enumerate(rows) if "score/0" in row for member in range(6)]  # fmt: skip
    assert abs(min(ends[:6])[1] - 1) > 0.85
    assert abs(min(ends)[1] - 1) < 0.2


def test_settings_keep_to_their_ranges():
    state, _ = search(Swarm(every=2, **RANGE), 31)
    rates = settings(state.optimizer, ["learning_rate"])["learning_rate"]
    assert ((rates >= np.float32(1e-3)) & (rates <= np.float32(2.0))).all()


JOB = """
[mesh]
simulate = 8
[parallel]
data = 4
fsdp = 2
[model]
name = "mlp"
dim = 16
[data]
source = "digits"
[optimizer]
warmup = 1
[sweep]
method = "evolution"
members = 4
every = 4
[sweep.over]
optimizer.learning_rate = { log_uniform = [1e-4, 1e-1] }
[train]
loss = "classify"
steps = 12
global_batch = 16
eval_batches = 1
[checkpoint]
every = 6
keep_last = 2
"""


def rows_in(folder):
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [{name: value for name, value in row.items() if "second" not in name} for row in rows]


@pytest.mark.slow
@pytest.mark.parametrize(
    "method", [pytest.param("evolution", marks=pytest.mark.slow), pytest.param("swarm", marks=pytest.mark.full)]
)
def test_a_search_that_is_resumed_goes_on_to_the_bit(method, tmp_path, capsys):
    job = parse.loads(JOB, [f"run.dir={tmp_path}", f"sweep.method={method}"])
    train(job)
    last = capsys.readouterr().out.splitlines()
    (line,) = (line for line in last if line.startswith("best of the rounds before: loss "))
    rows = rows_in(tmp_path)
    scores = {(row["step"], member): row[f"score/{member}"] for row in rows if "score/0" in row for member in range(4)}
    assert {step for step, _ in scores} == {5, 9}
    step, member = min(scores, key=lambda each: scores[each])
    rate = rows[step - 2][f"learning_rate/{member}"]
    assert f"in the round from step {step - 4}, optimizer.learning_rate = {rate:.4g}" in line
    train(job, at=6)
    assert rows_in(tmp_path) == rows


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("sweep.every=1", "sweep.every = 1"),
        ("sweep.factors=[0.5, 2.0]", "sweep.factors = (0.5, 2.0) with sweep.method = 'evolution'"),
        ("sweep.over.optimizer.learning_rate=[1e-3, 1e-2]", "evolution changes settings within the range"),
    ],
)
def test_what_is_no_search_is_refused(override, message):
    with pytest.raises(JaxparError) as caught:
        parse.loads(JOB, [override])
    assert message in str(caught.value)
