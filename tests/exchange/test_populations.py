"""Populations: members beside runs of their own, one program for all, and copies that are the best to the bit."""

import functools
import json
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from test_seams_exchange import batch as batch_of
from test_seams_exchange import composed, loss, over_data
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.exchange.population.copying import copy_members
from jaxpar.exchange.population.population import Pbt, Population
from jaxpar.exchange.population.sweep import Sweep
from jaxpar.job.file import parse
from jaxpar.job.run import train
from jaxpar.job.sample import SamplingRequest, sample
from jaxpar.job.sweep import lineage
from jaxpar.optim import optax_chain
from jaxpar.optim.optimizer import Optimizer
from jaxpar.optim.step_inputs import settings

STEPS = 4
SPEC = Optimizer(name="adamw", warmup=1, weight_decay=0.1, clip=0.5)
VALUES = {"learning_rate": (1e-3, 3e-3, 1e-2, 3e-2), "clip": (0.0, 0.5, 0.1, 1.0), "final": (0.1, 0.0, 1.0, 0.5)}
SWEPT = optax_chain.build(SPEC, STEPS, VALUES)
LAYOUTS = [dict(data=4), dict(data=2, fsdp=2, tensor=2), dict(data=1, fsdp=2), dict(data=2, fsdp=4, zero=1)]


def noisy(model, batch, key):
    return loss(model, batch | {"x": batch["x"] + 0.1 * jax.random.normal(key, batch["x"].shape)})


def trained(layout, optimizer, of=loss, steps=STEPS):
    state, step, rows = jp.init_state(layout, optimizer), jp.train_step(layout, of, optimizer), []
    for i in range(steps):
        state, metrics = step(state, batch_of(i))
        rows.append({name: float(value) for name, value in metrics.items()})
    return state, rows, step


@functools.cache
def alone(member, of):
    """A run of its own with the settings of a member."""
    spec = replace(SPEC, **{name: values[member] for name, values in VALUES.items()})
    state, rows, _ = trained(composed(dict(fsdp=1), jp.Exchange("all_reduce")), optax_chain.build(spec, STEPS), of)
    return jax.device_get(jax.tree.leaves(state.params)), [row["loss"] for row in rows]


def named(value):
    """Returns what a case is called: every process calls it so."""
    return getattr(value, "__name__", str(value))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("sizes", "of"), some([(sizes, of) for sizes in LAYOUTS for of in (loss, noisy)], [(LAYOUTS[1], noisy)]), ids=named
)
def test_each_member_trains_as_in_a_run_of_its_own(sizes, of):
    state, rows, step = trained(composed(sizes, Population(values=VALUES)), SWEPT, of)
    for member in range(4):
        params, losses = alone(member, of)
        np.testing.assert_allclose([row[f"loss/{member}"] for row in rows], losses, rtol=1e-6)
        assert_same_arrays([x[member] for x in jax.tree.leaves(state.params)], params, 1e-6)
    assert [row["loss"] for row in rows] == [min(row[f"loss/{member}"] for member in range(4)) for row in rows]
    assert len(step.programs) == 1  # for all settings


@pytest.mark.nightly
def test_a_member_whose_numbers_are_not_finite_stands_still_and_no_other_does():
    values = {"learning_rate": (1e-2, 1e30)}
    state, rows, step = trained(
        composed(dict(data=2), Population(values=values)), optax_chain.build(SPEC, STEPS, values)
    )
    assert all(np.isfinite(x).all() for x in jax.tree.leaves(jax.device_get(state.params)))
    assert rows[-1]["loss/0"] == rows[-1]["loss"] < rows[0]["loss"]
    assert {name for name in step.evaluate(state, batch_of(0))} == {"loss/0", "loss/1"}
    assert step.gradients.evaluation_metrics({"loss/0": np.nan, "loss/1": 2.0, "accuracy/1": 0.5})["loss"] == 2.0


@pytest.mark.slow
@pytest.mark.parametrize("exchanges", [0, pytest.param(1, marks=pytest.mark.full)])
def test_nothing_travels_between_members_but_where_they_copy(exchanges):
    values = {"learning_rate": VALUES["learning_rate"] * 2}
    layout = composed(dict(data=4, fsdp=2), Pbt(values=values, every=3), jp.target_devices("h100:1x8"))
    optimizer = optax_chain.build(Optimizer(name="sgd"), STEPS, values)
    report = jp.inspect(jp.train_step(layout, loss, optimizer), batch_of(0), sync_round=exchanges)
    assert {entry.kind for entry in over_data(report)} >= {"collective-permute"} if exchanges else not over_data(report)
    assert [flag for flag in report.flags if flag.kind == "idle axis"] == []


# population based training


class Point(nnx.Module):
    def __init__(self, rngs):
        self.at = nnx.Param(jnp.ones((4,)))


def bowl(model, batch):
    return jnp.sum(model.at[...] ** 2) / 2 * batch["x"].size, batch["x"].size


@pytest.mark.slow
def test_on_a_quadratic_the_worst_copies_the_best_to_the_bit():
    rates = (0.1, 0.9, 1.5, 1.8)  # each step multiplies by 1 - rate
    exchange = Pbt(values={"learning_rate": rates}, every=3, within={"learning_rate": (0.1, 1.9)})
    chained = optax.inject_hyperparams(optax.sgd)(learning_rate=0.0, momentum=0.0)
    layout = jp.compose(lambda rngs: Point(rngs), jp.Parallel(data=2, exchange=exchange), jax.devices()[:2])
    state, step = jp.init_state(layout, chained), jp.train_step(layout, bowl, chained)
    for _ in range(3):
        state, found = step(state, {"x": np.ones((2,), np.float32)})
    assert [int(found[f"from/{member}"]) for member in range(4)] == [1, 1, 2, 3]
    at, trace = (np.asarray(jax.tree.leaves(tree)[-1]) for tree in (state.params, state.optimizer))
    assert (at[0] == at[1]).all()
    assert (trace[0] == trace[1]).all()
    np.testing.assert_allclose(at[:, 0], [(1 - rate) ** 3 for rate in (0.9, 0.9, 1.5, 1.8)], rtol=1e-5)
    now = settings(state.optimizer, ["learning_rate"])["learning_rate"]
    assert float(now[0]) in (np.float32(0.9) * np.float32(0.8), np.float32(0.9) * np.float32(1.2))
    np.testing.assert_array_equal(now[1:], np.float32(rates[1:]))


@pytest.mark.nightly
def test_explored_settings_stay_in_their_range_and_draws_differ_between_meetings():
    exchange = Pbt(values={"learning_rate": tuple(np.linspace(0.1, 1, 64))}, within={"learning_rate": (0.5, 0.9)})
    key = lambda met: jax.random.fold_in(jax.random.key(0), met)  # noqa: E731
    source, copies = exchange.exploit(jnp.arange(64.0).at[3].set(jnp.nan), key(0))
    assert copies.sum() == 12  # a fifth
    assert bool(copies[3])
    assert set(np.asarray(source)[np.asarray(copies)]) <= {0, 1, 2, *range(4, 13)}
    assert (np.asarray(source)[~np.asarray(copies)] == np.arange(64)[~np.asarray(copies)]).all()
    usual = {"learning_rate": jnp.full(64, 0.6)}
    each = [exchange.explore(usual, copies, key(met))["learning_rate"] for met in (0, 0, 1)]
    assert {f"{value:.2f}" for value in each[0][copies]} == {"0.50", "0.72"}  # 0.48 would be below
    assert (each[0] == each[1]).all()
    assert (each[0] != each[2]).any()


def test_copies_are_bit_for_bit_of_any_dtype_and_random_keys():
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))
    on = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    source = jnp.array([5, 1, 7, 0, 4, 5, 6, 2])
    tree = {
        "a": jnp.arange(24.0).reshape(8, 3).at[5].set(-0.0).at[7].set(jnp.nan), "b": jnp.arange(8, dtype=jnp.int8),
        "key": jax.random.split(jax.random.key(1), 8),
    }  # fmt: skip
    found = jax.jit(lambda tree: copy_members(tree, source, mesh))(jax.device_put(tree, on))
    np.testing.assert_array_equal(
        np.asarray(found["a"]).view(np.int32), np.asarray(tree["a"])[source].view(np.int32)
    )  # also the sign of 0
    np.testing.assert_array_equal(found["b"], tree["b"][source])
    np.testing.assert_array_equal(jax.random.key_data(found["key"]), jax.random.key_data(tree["key"][source]))


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
[sweep]
method = "pbt"
members = 8
every = 3
[sweep.over]
optimizer.learning_rate = { log_uniform = [1e-4, 1e-1] }
optimizer.weight_decay = { uniform = [0.0, 0.2] }
[train]
loss = "classify"
steps = 8
global_batch = 16
eval_batches = 2
[checkpoint]
every = 4
keep_last = 2
"""


def said_in(folder):
    """Returns what a run says of each step, but for the time it took; and its lineage."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    rows = [{name: value for name, value in row.items() if "second" not in name} for row in rows]
    return rows, [json.loads(line) for line in (folder / "lineage.jsonl").read_text().splitlines()]


def arrays_in(checkpoint):
    return {path.name: path.read_bytes() for path in sorted((checkpoint / "arrays").iterdir())}


@pytest.mark.nightly
def test_a_population_that_is_resumed_goes_on_to_the_bit(tmp_path, capsys):
    job = parse.loads(JOB, [f"run.dir={tmp_path}"])
    train(job)
    last = capsys.readouterr().out.splitlines()[-1]
    straight = said_in(tmp_path)
    train(job, at=4)  # after a meeting in step 3, before one in step 6
    assert said_in(tmp_path) == straight
    assert arrays_in(tmp_path / "checkpoints/000008") == arrays_in(tmp_path / "checkpoints/000008.left")
    rows, lines = straight
    assert [line["step"] for line in lines] == [3, 6]  # one of eight each: a fifth
    for line in lines:
        row, before = rows[line["step"] - 1], rows[line["step"] - 2]
        assert line["old"]["learning_rate"] == pytest.approx(before[f"learning_rate/{line['member']}"])
        assert line["new"]["learning_rate"] == row[f"learning_rate/{line['member']}"]
    best = min(range(8), key=lambda member: rows[-1][f"eval_loss/{member}"])
    assert last.startswith(f"best member: {best}, eval loss {rows[-1]['eval_loss']:.4f}, optimizer.learning_rate = ")


def test_a_population_is_no_model_that_writes_text(tmp_path):
    (tmp_path / "job.toml").write_text(JOB)
    with pytest.raises(JaxparError, match="8 members of a sweep"):
        sample(tmp_path, ["a"], SamplingRequest(tokens=1))


def test_lineage_has_who_copied_whom_with_settings_before_and_after():
    rows = [{"step": 1, "lr/0": 1.0, "lr/1": 2.0}, {"step": 2, "lr/0": 1.6, "lr/1": 2.0, "from/0": 1.0, "from/1": 1.0}]
    assert [*lineage(rows, {"lr": (1.0, 2.0)})] == [
        {"step": 2, "member": 0, "from": 1, "old": {"lr": 1.0}, "new": {"lr": 1.6}}
    ]


def test_a_grid_has_every_combination_and_draws_follow_from_the_seed():
    grid = Sweep(over={"optimizer": {"learning_rate": [1, 2], "clip": [0.5, 0.6, 0.7]}})
    assert grid.values == {"learning_rate": (1, 1, 1, 2, 2, 2), "clip": (0.5, 0.6, 0.7) * 2}
    over = {"optimizer": {"learning_rate": {"log_uniform": [1e-4, 1e-2]}, "beta1": {"choice": [0.8, 0.9]}}}
    drawn = Sweep(method="random", members=400, over=over)
    rates = np.log10(drawn.values["learning_rate"])
    assert -4 <= rates.min() < -3.9
    assert -2.1 < rates.max() <= -2
    assert abs(rates.mean() + 3) < 4 * 2 / np.sqrt(12 * 400)  # four standard errors
    assert set(drawn.values["beta1"]) == {0.8, 0.9}
    assert Sweep(method="random", members=400, over=over).values == drawn.values
    assert Sweep(method="random", members=400, over=over, seed=1).values != drawn.values
