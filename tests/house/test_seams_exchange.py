"""The house takes a new way to agree: a toy one, added here through the public seam alone."""

import dataclasses
import json
import re
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.exchange.base import AllReduce, Exchange
from jaxpar.exchange.collectives import algorithms
from jaxpar.exchange.collectives.algorithms import padded_size, seconds, traffic_seconds
from jaxpar.exchange.replica_mesh import mean_traffic
from jaxpar.exchange.table import with_exchange
from jaxpar.job.check import check
from jaxpar.job.file import dump, parse
from jaxpar.job.parts.models import resolve_loss, resolve_model
from jaxpar.job.plan import apply_layout, question
from jaxpar.job.run import train
from jaxpar.job.run_weights import start_from_params
from jaxpar.job.shrink import fit_processes
from jaxpar.mesh.chips import Link
from jaxpar.parallel.layout import replica_messages
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import JAXPAR_FUSED
from jaxpar.plan.search import predict

ROOT = Path(__file__).parents[2]
CHAIN = optax.chain(optax.clip_by_global_norm(0.5), optax.adam(1e-2, eps=1e-4))
ROWS, DIM, WIDE = 16, 16, 32


@dataclass(frozen=True, kw_only=True)
class Half(Exchange):
    """Every second step the replicas average their parameters.

    Attributes:
      name: half.
      every: Steps from one average to the next.
      algorithm: By whose messages they average, one of jaxpar's; "" is XLA's all-reduce.
    """

    name: str = "half"
    every: int = 2
    algorithm: str = ""
    replicas_differ = True

    def __post_init__(self):
        if self.algorithm:
            algorithms.check(self.algorithm)

    def init(self, params, replicas):
        return {"met": jnp.zeros((), jnp.int32)}

    def synchronize(self, replicas, between):
        params = between.spread(between.mean(replicas.params, self.algorithm))
        return dataclasses.replace(replicas, params=params, exchange_state={"met": replicas.exchange_state["met"] + 1})

    def traffic(self, shards, replicas):
        return mean_traffic(shards, replicas, every=self.every, algorithm=self.algorithm)


@dataclass(frozen=True, kw_only=True)
class Rounded(Exchange):
    """Gradients are summed in a small dtype, and what that loses is remembered for the next step.

    Attributes:
      name: rounded.
      dtype: In which they travel.
    """

    name: str = "rounded"
    dtype: str = "bfloat16"

    def init(self, params, replicas):
        return {"lost": jax.tree.map(lambda x: jnp.zeros((replicas, *x.shape), x.dtype), params)}

    def gradients(self, local, state, between):
        whole = jax.tree.map(jnp.add, local, state["lost"])
        sent = jax.tree.map(lambda x: x.astype(self.dtype).astype(x.dtype), whole)
        return between.mean(sent), {"lost": jax.tree.map(jnp.subtract, whole, sent)}


@pytest.fixture(autouse=True)
def half():
    with with_exchange("half", Half):
        yield


class Net(nnx.Module):
    def __init__(self, rngs):
        split = nnx.with_partitioning(nnx.initializers.normal(0.3), (None, "mlp"))
        back = nnx.with_partitioning(nnx.initializers.normal(0.3), ("mlp", None))
        self.up = nnx.Linear(DIM, WIDE, kernel_init=split, rngs=rngs)
        self.down = nnx.Linear(WIDE, DIM, kernel_init=back, rngs=rngs)

    def __call__(self, x):
        x = jp.constrain(x, "batch", "embed")
        return self.down(jp.constrain(nnx.tanh(self.up(x)), "batch", "mlp"))


def loss(model, batch):
    error = jnp.mean((model(batch["x"]) - batch["y"]) ** 2, axis=-1)
    return jnp.sum(error * batch["mask"]), jnp.sum(batch["mask"])


def batch(step):
    rng = np.random.default_rng(step)
    x, y = rng.normal(size=(2, ROWS, DIM)).astype(np.float32)
    return {"x": x, "y": y, "mask": (np.arange(ROWS) % 3 > 0).astype(np.float32)}  # replicas count unequally


LAYOUTS = {
    "data": dict(data=4),
    "fsdp": dict(data=4, fsdp=2),
    "fsdp, ZeRO-1": dict(data=2, fsdp=4, zero=1),
    "tensor": dict(data=2, tensor=4),
    "fsdp x tensor": dict(data=2, fsdp=2, tensor=2),
}


def composed(sizes, exchange=None, devices=None):
    parallel = jp.Parallel(**sizes, exchange=exchange or Half())
    return jp.compose(lambda rngs: Net(rngs), parallel, devices or jax.devices()[: np.prod(list(numbers(sizes)))])


def numbers(sizes):
    return (size for axis, size in sizes.items() if axis != "zero")


def trained(sizes, steps=5, *, exchange=None, state=None, first=0, chain=CHAIN, **numerics):
    layout = composed(sizes, exchange)
    state = jp.init_state(layout, chain) if state is None else state
    step, losses = jp.train_step(layout, loss, chain, **numerics), []
    for i in range(first, first + steps):
        state, metrics = step(state, batch(i))
        losses.append(float(metrics["loss"]))
    return state, losses


def born():
    """Returns the parameters that every replica begins with, as nested dicts."""
    return jax.device_get(
        jp.init_state(jp.compose(lambda rngs: Net(rngs), jp.Parallel(), jax.devices()[:1]), CHAIN)
    ).params


def sums_of(params, rows):
    up, down = params["up"], params["down"]
    y = jnp.tanh(rows["x"] @ up["kernel"] + up["bias"]) @ down["kernel"] + down["bias"]
    error = jnp.mean((y - rows["y"]) ** 2, axis=-1)
    return jnp.sum(error * rows["mask"]), jnp.sum(rows["mask"])


def rows_of(step, replica, replicas):
    count = ROWS // replicas
    return {key: value[replica * count : (replica + 1) * count] for key, value in batch(step).items()}


@jax.jit
def alone(params, kept, rows):
    """One step of one model, in plain JAX."""
    mean = lambda params: sums_of(params, rows)[0] / sums_of(params, rows)[1]  # noqa: E731
    updates, kept = CHAIN.update(jax.grad(mean)(params), kept, params)
    return optax.apply_updates(params, updates), kept, sums_of(params, rows)


def by_hand(replicas, steps=5, every=2):
    """Replicas on one device, one after the other."""
    each, kept, losses = [born()] * replicas, [CHAIN.init(born())] * replicas, []
    for i in range(steps):
        made = [alone(each[r], kept[r], rows_of(i, r, replicas)) for r in range(replicas)]
        each, kept, sums = ([*column] for column in zip(*made, strict=True))
        losses.append(float(sum(total for total, _ in sums) / sum(count for _, count in sums)))
        if (i + 1) % every == 0:
            each = [jax.tree.map(lambda *x: sum(x) / replicas, *each)] * replicas
    return jax.tree.map(lambda *x: jnp.stack(x), *each), losses


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", some(LAYOUTS.values(), [LAYOUTS["data"]], [LAYOUTS["fsdp"]]), ids=LAYOUTS)
def test_each_replica_trains_as_it_would_alone(sizes):
    want, expected = by_hand(sizes["data"])
    state, losses = trained(sizes)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(jax.tree.leaves(state.params), jax.tree.leaves(want))
    assert int(state.exchange["met"]) == 2
    spread = np.asarray(jax.tree.leaves(state.params)[0])
    assert np.abs(spread - spread[:1]).max() > 1e-4  # after five steps they have gone apart again


@pytest.mark.nightly
@pytest.mark.parametrize("algorithm", some(["ring", "halving"], ["ring"]))
def test_they_average_by_any_algorithm(algorithm):
    want, expected = by_hand(4)
    state, losses = trained({"data": 4, "fsdp": 2}, exchange=Half(algorithm=algorithm))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(jax.tree.leaves(state.params), jax.tree.leaves(want))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "numerics",
    some([{"accumulate": 2}, {"remat": "full"}, {"guard": True}], [{"accumulate": 2}], [{"guard": True}]),
    ids=str,
)
def test_steps_apart_compute_as_any_step_may(numerics):
    _, expected = by_hand(2)
    _, losses = trained({"data": 2, "fsdp": 2}, **numerics)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_a_replica_none_of_whose_examples_count_stays_as_it_is():
    layout = composed({"data": 4})
    state, some = jp.init_state(layout, CHAIN), batch(0)
    before = jax.device_get(state.params)
    state, metrics = jp.train_step(layout, loss, CHAIN)(state, some | {"mask": some["mask"] * (np.arange(ROWS) > 3)})
    moved = jax.tree.map(lambda x, y: np.abs(np.asarray(x) - y).max(axis=(*range(1, y.ndim),)), state.params, before)
    assert all((x[0] == 0) and (x[1:] > 0).all() for x in jax.tree.leaves(moved))
    assert np.isfinite(metrics["loss"])


def test_an_evaluation_is_of_the_mean_of_replicas():
    state, _ = trained({"data": 4}, 3)
    found = jp.train_step(composed({"data": 4}), loss, CHAIN).evaluate(state, batch(9))["loss"]
    mean = jax.tree.map(lambda x: x.mean(0), jax.device_get(state.params))
    np.testing.assert_allclose(found, sums_of(mean, batch(9)), rtol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(
    "sizes", some([dict(data=4, fsdp=2), dict(data=2, fsdp=2, zero=1, tensor=2)], [dict(data=4, fsdp=2)], []), ids=str
)
def test_an_exchange_of_gradients_keeps_replicas_equal(sizes, tmp_path):
    _, expected = by_hand(1)
    state, losses = trained(sizes, exchange=Rounded(dtype="float32"))
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert not any(x.any() for x in jax.tree.leaves(state.exchange))
    state, losses = trained(sizes, exchange=Rounded())
    np.testing.assert_allclose(losses, expected, rtol=1e-2)
    lost, params = state.exchange["lost"]["up"]["kernel"], state.params["up"]["kernel"]
    assert np.abs(lost).max() > 0
    assert (lost.shape, params.shape) == ((sizes["data"], DIM, WIDE), (DIM, WIDE))
    assert lost.sharding.spec[0] == "data"
    with saved(tmp_path, state, 5) as store:
        step = jp.train_step(composed(sizes, Rounded()), loss, CHAIN)
        assert_same_arrays(store.restore(step.abstract())[0], state, 0)


def inspected(sizes, *, exchanges, exchange=None, chain=CHAIN):
    layout = composed(sizes, exchange, jp.target_devices("h100:1x8"))
    shapes = {key: jax.ShapeDtypeStruct(value.shape, value.dtype) for key, value in batch(0).items()}
    return layout, jp.inspect(jp.train_step(layout, loss, chain), shapes, sync_round=exchanges)


def over_data(report):
    return [entry for entry in report.ledger if "data" in entry.axis]


@pytest.mark.nightly
@pytest.mark.parametrize("sizes", some([dict(data=8), dict(data=2, fsdp=2, tensor=2)], [dict(data=8)], []), ids=str)
def test_what_it_says_it_sends_is_in_the_step_that_exchanges_and_nothing_in_the_others(sizes):
    layout, between = inspected(sizes, exchanges=True)
    sent = replica_messages(layout)
    assert {each.every for each in sent} == {2}
    assert {entry.kind for entry in over_data(between)} == {"all-reduce"} == {each.collective.kind for each in sent}
    assert sum(entry.step_payload for entry in over_data(between)) == sum(e.collective.step_payload for e in sent)
    _, alone = inspected(sizes, exchanges=False)
    assert over_data(alone) == []
    assert [flag for flag in alone.flags if flag.kind == "idle axis"] == []


@pytest.mark.nightly
def test_the_default_sends_gradients_as_it_says():
    layout, report = inspected(dict(data=8), exchanges=False, exchange=AllReduce())
    found = [entry for entry in over_data(report) if entry.parameters]
    assert {entry.kind for entry in found} == {"all-reduce"}
    assert sum(entry.step_payload for entry in found) == sum(
        each.collective.step_payload for each in replica_messages(layout)
    )


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("algorithm", some(["ring", "tree"], ["ring"]))
def test_an_algorithm_sends_the_messages_of_its_table(algorithm):
    exchange = Half(algorithm=algorithm)
    layout, report = inspected(dict(data=4, fsdp=2), exchanges=True, exchange=exchange)
    sent, found = [each.collective for each in replica_messages(layout)], over_data(report)
    assert {entry.kind for entry in found} == {"collective-permute"}
    assert sum(entry.step_wire for entry in found) == sum(each.step_wire for each in sent)
    assert sum(entry.times for entry in found) == sum(each.times for each in sent)
    (note,) = (note for note in report.notes if "half" in note)
    assert re.search(r"half every 2 steps \(algorithm='\w+'\); replicas differ, and send .*which takes [\d.]+ ms", note)
    link = Link(latency=1e-6, bandwidth=1e9)
    count = padded_size(sum(place.leaf.size for place in layout.placements.values()) // 2, 4)
    assert traffic_seconds(replica_messages(layout), link) == pytest.approx(
        seconds(algorithms.all_reduce_rounds(algorithm, 4, count), link, item=4)
    )


HALF_FROZEN = optax.multi_transform(
    {"frozen": optax.set_to_zero(), "trained": CHAIN}, {"up": "frozen", "down": "trained"}
)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "exchange",
    [
        pytest.param(Half(), marks=pytest.mark.slow),
        pytest.param(Half(algorithm="ring"), marks=pytest.mark.slow),
        Rounded(),
    ],
    ids=str,
)
def test_an_exchange_sends_nothing_of_what_is_frozen(exchange):
    *_, report = inspected(dict(data=8), exchanges=exchange.every > 0, exchange=exchange, chain=HALF_FROZEN)
    found = [entry for entry in over_data(report) if entry.step_payload > 8]  # but the sums of the loss
    of_trained = 4 * (WIDE * DIM + DIM)
    if found[0].kind == "all-reduce":
        assert sum(entry.step_payload for entry in found) == of_trained
    else:
        assert sum(entry.step_wire for entry in found) == pytest.approx(2 * 7 / 8 * of_trained, rel=0.02)


@pytest.mark.nightly
def test_what_is_frozen_stays_and_what_is_trained_is_as_in_all_reduce():
    want, expected = trained({"data": 4}, exchange=AllReduce(), chain=HALF_FROZEN)
    state, losses = trained({"data": 4}, exchange=Rounded(dtype="float32"), chain=HALF_FROZEN)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)
    assert_same_arrays(state.params, want.params)
    assert state.exchange["lost"]["up"] == {"kernel": None, "bias": None}
    state, _ = trained({"data": 4}, exchange=Half(), chain=HALF_FROZEN)
    assert_same_arrays(state.params["up"], jax.tree.map(lambda x: np.stack([x] * 4), born()["up"]), 0)


def test_it_is_explained():
    layout = composed({"data": 4, "fsdp": 2})
    assert "data 4 x fsdp 2, ZeRO-3, half every 2 steps: " in layout.summary()
    assert re.search(r"exchange: half every 2 steps; replicas differ, and send [\d.]+ KiB a device", layout.explain())


@pytest.mark.parametrize(
    ("parallel", "said"),
    [
        (dict(exchange=Half(), fsdp=8), "exchange half every 2 steps with data=1 does nothing"),
        (dict(exchange=Half(), data=4, pipe=2), "exchange half every 2 steps with pipe=2"),
        (dict(exchange="half", data=8), "exchange='half'"),
        (dict(exchange=Half(), data=8, rules={"mlp": "data"}), "with exchange half every 2 steps"),
    ],
    ids=["idle", "pipeline", "text", "a parameter split over data"],
)
def test_what_it_cannot_do_is_refused(parallel, said):
    with pytest.raises(JaxparError, match=re.escape(said)):
        jp.compose(lambda rngs: Net(rngs), jp.Parallel(**parallel))


def test_an_optimizer_state_in_host_memory_is_refused():
    with pytest.raises(JaxparError, match="offload with exchange half"):
        jp.train_step(composed({"data": 8}), loss, CHAIN, offload=True)


JOB = "[mesh]\nsimulate = 8\n[parallel]\ndata = 4\nfsdp = 2\n[parallel.exchange]\nname = 'half'\nevery = 3\n"


def test_it_is_declared_in_a_job():
    job = parse.loads(JOB)
    assert job.parallel.exchange == Half(every=3)
    assert parse.loads(dump.dumps(job)) == job
    assert check(job) == []
    with pytest.raises(JaxparError, match=r"unknown key parallel\.exchange\.evry"):
        parse.loads(JOB.replace("every", "evry"))
    with pytest.raises(JaxparError, match=r"parallel\.exchange\.name = \"halve\"") as caught:
        parse.loads(JOB.replace("'half'", "'halve'"))
    assert "half" in str(caught.value)
    assert "idle" not in str(check(parse.loads(JOB, ["parallel.data=1", "parallel.fsdp=8"])))


@contextmanager
def saved(folder, state, step):
    store = Store(folder, Checkpoints())
    store.save(step, state, {})
    store.wait()
    yield store
    store.close()


@pytest.mark.slow
def test_a_run_is_resumed_in_the_middle_of_a_period(tmp_path):
    sizes = {"data": 4, "fsdp": 2}
    state, _ = trained(sizes, 3)
    with saved(tmp_path, state, 3) as store:
        like = jp.train_step(composed(sizes), loss, CHAIN).abstract()
        restored, _ = store.restore(like)
        assert_same_arrays(restored, state, 0)
        _, losses = trained(sizes, 3, state=restored, first=3)
        _, expected = trained(sizes, 6)
        assert losses == expected[3:]
        elsewhere, _ = store.restore(jp.train_step(composed({"data": 4, "tensor": 2}), loss, CHAIN).abstract())
        _, losses = trained({"data": 4, "tensor": 2}, 3, state=elsewhere, first=3)
        np.testing.assert_allclose(losses, expected[3:], rtol=1e-5)
        for other in (dict(fsdp=8), dict(data=4, fsdp=2)):
            plain = jp.compose(lambda rngs: Net(rngs), jp.Parallel(**other))
            with pytest.raises(JaxparError, match="the checkpoint holds 4 replicas that differ, the job one set of"):
                store.restore(jp.train_step(plain, loss, CHAIN).abstract())


SMALL = ["model.layers=1", "model.dim=16", "model.heads=2", "model.dropout=0.1", "data.seq=8", "train.global_batch=16",
         "optimizer.decay=constant", "optimizer.warmup=0", "checkpoint.every=2", "train.eval_batches=1"]  # fmt: skip


@pytest.mark.nightly
def test_a_job_trains_evaluates_and_goes_on_in_the_middle_of_a_period(tmp_path):
    def losses(name, steps):
        train(parse.loads(JOB, [*SMALL, f"train.steps={steps}", f"run.dir={tmp_path / name}"]))
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [(row["step"], row["loss"]) for row in rows], rows[-1]["eval_loss"]

    whole = losses("whole", 5)
    losses("twice", 2)
    assert losses("twice", 5) == whole


def test_a_run_on_fewer_processes_keeps_the_number_of_replicas_that_differ():
    job = parse.loads(JOB, ["train.global_batch=32"])
    assert fit_processes(job, processes=2, most=1) == (1, ["mesh.simulate=4", "parallel.fsdp=1", "parallel.data=4"])


def test_a_run_begins_with_given_parameters_on_every_replica():
    layout = composed({"data": 4, "fsdp": 2})
    given = {path: np.full(place.leaf.shape, 2.0, np.float32) for path, place in layout.placements.items()}
    state = start_from_params(layout, CHAIN, given)
    assert all((x == 2).all() and len(x) == 4 for x in jax.tree.leaves(state.params))
    jp.train_step(layout, loss, CHAIN)(state, batch(0))


# planned

PLANNED = """
[model]
name = "decoder"
layers = 2
dim = 64
heads = 4
[data]
seq = 32
[train]
global_batch = 16
precision = "bf16"
[parallel]
data = 2
[parallel.exchange]
name = "half"
"""


def asked(*overrides, devices=8):
    return question(parse.loads(PLANNED, overrides), devices=devices, chip="h100", per_node=4, options={})


def test_a_plan_has_layouts_whose_replicas_can_step_apart():
    found = asked().legal()
    assert {*found.data.tolist()} == {2, 4, 8}
    assert {*found.pipe.tolist()} == {1}
    with pytest.raises(JaxparError, match=r"exchange half every 2 steps on 2 devices"):
        asked("train.global_batch=1", devices=2).legal()


def test_a_plan_has_its_bytes_and_seconds_by_a_cause_of_its_own():
    layout = Candidate(data=4, fsdp=2, zero=3, microbatch=2)
    often, seldom = (predict(asked(f"parallel.exchange.every={every}"), layout) for every in (2, 20))
    plain = replace(asked(), software=JAXPAR_FUSED)
    held = plain.model.parameters // 2
    assert often.time.exchange == pytest.approx(2 * float(plain.hardware.gather(4 * held, 4, 2)) / 2)
    assert often.time.exchange == pytest.approx(10 * seldom.time.exchange)
    assert often.time.sharding < predict(plain, layout).time.sharding
    assert often.memory.exchange == 4  # of the counter
    rounded = replace(plain, software=replace(JAXPAR_FUSED, exchange=Rounded()))
    assert predict(rounded, layout).memory.exchange == 4 * held
    assert "exchange" not in predict(plain, layout).time
    messages = predict(asked("parallel.exchange.algorithm=ring"), layout)
    assert messages.time.exchange == pytest.approx(3 * float(plain.hardware.send(4 * held // 4, 2, 4)), rel=1e-3)


def test_a_plan_prices_the_bytes_that_its_layouts_send():
    """Those of a layout are held to the ledger of the program above; weights that fsdp leaves whole come on top."""
    job = apply_layout(parse.loads(PLANNED), Candidate(data=4, fsdp=2, zero=3, microbatch=2), 1)
    layout = jp.compose(resolve_model(job, resolve_loss(job)), job.parallel, 8)
    sent = sum(each.collective.payload for each in replica_messages(layout))
    assert sent == pytest.approx(4 * asked().model.parameters / 2, rel=0.01)


@pytest.mark.slow
def test_a_plan_shows_it_and_writes_it(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(PLANNED)
    words = ["--devices", "8", "--chip", "h100", "--html", "p.html", "--json", "p.json", "--write", "made.toml"]
    assert main(["plan", "job.toml", *words]) == 0
    assert re.search(r"X exchange\b", capsys.readouterr().out)
    assert "jx-t-exchange" in Path("p.html").read_text()
    assert json.loads(Path("p.json").read_text())["best"][0]["seconds"]["exchange"] > 0
    assert parse.load("made.toml").parallel.exchange == Half()


def test_the_house_does_not_know_the_toy():
    files = (ROOT / "jaxpar").rglob("*.py")
    assert [path for path in files if re.search(r"class Half\b|name: half|name = .half", path.read_text())] == []
