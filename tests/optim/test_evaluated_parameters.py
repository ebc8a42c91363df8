"""What is evaluated, sampled and exported where an optimizer says that it is not what is trained."""

import io
import json
from collections import Counter
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from pairwise import some
from tiny import Staged, assert_same_arrays, batches, token_loss
from tiny import train as trained

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store, listing, reading, start_from
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.exchange.population.population import Population
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import load, loads
from jaxpar.job.parts.models import resolve_model
from jaxpar.job.parts.optimizers import resolve_optimizer
from jaxpar.job.sample import SamplingRequest, load_text_model
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.huggingface.weights import load as load_folder
from jaxpar.optim.eval_params import ema_params, eval_arrays, eval_params, eval_sources
from jaxpar.optim.optax_lookup import LOSS, SMALL
from jaxpar.optim.step_inputs import update
from jaxpar.sharding.names import Compute, leaves_by_path, nest
from jaxpar.step.state import State

STEPS, DECAY = 5, 0.7
MODEL = partial(Staged, layers=4, tied=False)
WARM = optax.warmup_constant_schedule(0.0, 0.05, 3)  # whose first steps weigh less in an average
CHAINS = {
    "schedule_free": optax.contrib.schedule_free_adamw(WARM, b1=0.8, eps=1e-4, weight_decay=1e-2),
    "ema": optax.chain(optax.adamw(WARM, eps=1e-4), ema_params(DECAY)),
}
CUBE = {"data": 2, "fsdp": 2, "tensor": 2}
absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


def judged(name, state, history):
    """Returns what optax evaluates, of the state of a chain and the parameters after each of its steps."""
    if name == "schedule_free":
        return optax.contrib.schedule_free_eval_params(state, history[-1])
    mean, found = optax.ema(DECAY), None
    held = mean.init(history[0])
    for params in history:
        found, held = mean.update(params, held)
    return found


@cache
def alone(name):
    """Returns, by optax alone on one device, what is evaluated, its loss, and the loss of what is trained."""
    layout = jp.compose(MODEL, jp.Parallel(), jax.devices()[:1])
    begun = jp.init_state(layout, CHAINS[name], seed=1)

    @partial(jax.jit, static_argnames="train")
    def loss(params, batch, *, train=False):
        model = layout.blueprint.bind(params, begun.model_state, lambda _, value: value, Compute(train=train))
        total, count = token_loss(model, batch)["loss"]
        return total / count

    @jax.jit
    def step(params, state, batch):
        updates, state = CHAINS[name].update(jax.grad(partial(loss, train=True))(params, batch), state, params)
        return optax.apply_updates(params, updates), state

    params, state, history = begun.params, CHAINS[name].init(begun.params), []
    for batch in batches(STEPS):
        params, state = step(params, state, batch)
        history.append(params)
    held = next(batches(1))
    found = judged(name, state, history)
    return jax.device_get(found), float(loss(found, held)), float(loss(params, held))


def mean(sums):
    total, count = sums["loss"]
    return float(total) / float(count)


PIPED = {"pipe": 2, "data": 2, "fsdp": 2, "pipeline": jp.Pipeline(microbatches=4)}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("name", "sizes", "numerics"),
    [
        pytest.param("schedule_free", CUBE, {}, marks=pytest.mark.full),
        pytest.param("schedule_free", {"data": 2, "fsdp": 4, "zero": 1}, {"accumulate": 2}, marks=pytest.mark.full),
        pytest.param("schedule_free", {"fsdp": 4, "tensor": 2, "zero": 2}, {}, marks=pytest.mark.full),
        pytest.param("schedule_free", PIPED, {}, marks=pytest.mark.full),
        pytest.param("schedule_free", CUBE, {"offload": True}, marks=pytest.mark.slow),
        pytest.param("ema", CUBE, {}, marks=pytest.mark.slow),
    ],
    ids=["cube", "ZeRO-1, accumulated", "ZeRO-2", "pipeline", "offloaded", "average"],
)
def test_what_is_evaluated_on_a_mesh_is_what_optax_evaluates_on_one_device(name, sizes, numerics):
    params, loss, of_trained = alone(name)
    _, state, step = trained(MODEL, jp.Parallel(**sizes), chain=CHAINS[name], steps=STEPS, **numerics)
    found = mean(step.evaluate(state, next(batches(1))))
    assert found == pytest.approx(loss, rel=1e-6)
    assert abs(found - of_trained) > 1e-3
    assert_same_arrays(state.eval_params, params)
    for path, leaf in leaves_by_path(state.eval_params).items():  # which moves nothing
        assert leaf.sharding.is_equivalent_to(leaves_by_path(state.params)[path].sharding, leaf.ndim)


@pytest.mark.slow
def test_paths_of_what_is_evaluated_are_read_once_and_not_at_each_batch(monkeypatch):
    layout, batch = jp.compose(MODEL, jp.Parallel(), jax.devices()[:1]), next(batches(1))
    state, step = jp.init_state(layout, CHAINS["ema"], seed=1), jp.train_step(layout, token_loss, CHAINS["ema"])
    first = mean(step.evaluate(state, batch))
    with monkeypatch.context() as patch:
        patch.setattr("jaxpar.optim.eval_params._path", lambda keys: pytest.fail("a path was read"))
        assert mean(step.evaluate(state, batch)) == first
    with pytest.raises(JaxparError, match="another optimizer: its tree of optimizer is another"):
        step.evaluate(jp.init_state(layout, CHAINS["schedule_free"], seed=1), batch)


def evaluation(chain, **sizes):
    """Returns the bytes of each kind that an evaluation sends, as compiled for GPUs that are not there."""
    layout = jp.compose(partial(MODEL, dim=256, hidden=256), jp.Parallel(**sizes), jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, token_loss, chain)
    state, batch = step.abstract(), {k: step.placement.shape_struct(k, v) for k, v in next(batches(1)).items()}
    held = eval_arrays(state.optimizer)
    with step.compiler.trace_context():
        found = jp.inspect(step.evaluation, state.params, state.model_state, batch, held, mesh=layout.mesh)
    assert bool(held) == (chain is not PLAIN)
    sent = Counter()
    for each in found.ledger:
        sent[each.kind, each.axes, each.dtype] += each.step_payload
    return sent


PLAIN = optax.adamw(1e-3)


@pytest.mark.nightly
@absent
@pytest.mark.parametrize(
    "sizes",
    [pytest.param(CUBE, marks=pytest.mark.full), pytest.param({"fsdp": 8, "zero": 1}, marks=pytest.mark.slow)],
    ids=["cube", "ZeRO-1"],
)
def test_on_gpus_an_evaluation_sends_what_it_sends_with_any_optimizer(sizes):
    assert evaluation(CHAINS["schedule_free"], **sizes) == evaluation(PLAIN, **sizes)


def test_frozen_parameters_are_evaluated_as_they_are_and_others_by_the_chain_that_trains_them():
    params = {name: jnp.full((2, 3), value) for name, value in (("embed", 1.0), ("blocks", 2.0), ("head", 3.0))}
    gradients = jax.tree.map(jnp.ones_like, params)
    inner = optax.contrib.schedule_free_sgd(0.5)
    several = optax.multi_transform(
        {"free": inner, "plain": optax.adam(0.1), "mean": optax.chain(optax.sgd(0.5), ema_params(0.5))},
        {"embed": "plain", "blocks": "free", "head": "mean"},
    )
    for chain, moved in ((jp.freeze(inner, ["embed"]), {"blocks", "head"}), (several, {"blocks", "head"})):

        @jax.jit
        def stepped(new, chain=chain):
            state = chain.init(new)
            for _ in range(3):
                updates, state = chain.update(gradients, state, new)
                new = optax.apply_updates(new, updates)
            return new, eval_params(state, new)

        new, found = stepped(params)
        assert {name for name in new if (found[name] != new[name]).any()} == moved
        y, x, z = 2.0, 2.0, 2.0
        for step in range(1, 4):  # Defazio et al. (2024), equations 1 to 3
            z -= 0.5
            x += (z - x) / step
            y = 0.9 * x + 0.1 * z
        np.testing.assert_allclose((new["blocks"][0, 0], found["blocks"][0, 0]), (y, x), rtol=1e-6)


def test_two_averages_of_one_parameter_are_refused():
    twice = optax.chain(optax.contrib.schedule_free_sgd(0.5), ema_params(0.9))
    layout = jp.compose(MODEL, jp.Parallel(), jax.devices()[:1])
    with pytest.raises(JaxparError, match="at most one part"):
        jp.train_step(layout, token_loss, twice)
    with pytest.raises(JaxparError, match="from 0 to below 1"):
        ema_params(1.0)


@pytest.mark.parametrize("decay", [0, 0.5, 0.999, 0.9999999, 1 - 1e-8, 1 - 1e-12])
def test_an_average_is_that_of_float64_however_near_to_1_its_decay_is(decay):
    chain, values = ema_params(decay), [3.0, 5.0, 4.0, 8.0]
    state, weights = chain.init({"w": jnp.float32(1)}), [decay ** (len(values) - 1 - at) for at in range(len(values))]
    for value in values:
        _, state = chain.update({"w": jnp.float32(0)}, state, {"w": jnp.float32(value)})
    assert float(state.ema_params["w"]) == pytest.approx(np.average(values, weights=weights), rel=1e-6)


def test_a_state_is_known_by_all_its_names():
    of = lambda *names: {path: copy.path for path, copy in eval_sources(names).items()}  # noqa: E731
    whole = [f"1/{name}" for name in ("b1", "weight_sum", "step_count", "max_lr", "z/a/b")]
    assert of(*whole) == {"a/b": "1/z/a/b"}
    for name in whole[:-1]:
        assert of(*(each for each in whole if each != name)) == {}
    assert of("mu/z/a", "nu/z/a", "mu/b1", "nu/b1", "count") == {}  # a model's own parameters z and b1


# replicas that differ


@pytest.mark.nightly
def test_replicas_whose_meetings_leave_optimizers_behind_are_refused():
    def step_of(exchange, chain):
        return jp.train_step(jp.compose(MODEL, jp.Parallel(data=8, exchange=exchange)), token_loss, chain)

    for exchange in (jp.Exchange("diloco"), jp.Exchange("local"), jp.Exchange("gossip")):
        with pytest.raises(JaxparError, match=r"moves the parameters alone\n.*averaged"):
            step_of(exchange, CHAINS["schedule_free"])
        step_of(exchange, PLAIN)
    for exchange in (
        jp.Exchange("local", optimizer="averaged"),
        jp.Exchange("ensemble"),
        jp.Exchange("sign", smallest=1024),
    ):
        step_of(exchange, CHAINS["schedule_free"])


@pytest.mark.nightly
def test_replicas_that_average_both_are_evaluated_by_the_mean_of_what_each_would_be():
    averaged = jp.Parallel(data=2, fsdp=2, tensor=2, exchange=jp.Exchange("local", every=3, optimizer="averaged"))
    never = jp.Parallel(data=2, fsdp=2, tensor=2, exchange=jp.Exchange("ensemble"))
    _, met, step = trained(MODEL, averaged, chain=CHAINS["schedule_free"], steps=3)
    _, apart, _ = trained(MODEL, never, chain=CHAINS["schedule_free"], steps=3)
    wanted = jax.tree.map(lambda x: np.mean(x, 0, keepdims=True).repeat(2, 0), jax.device_get(apart.eval_params))
    assert_same_arrays(met.eval_params, wanted)
    model = jp.compose(MODEL, jp.Parallel(), jax.devices()[:1])
    alone = jp.init_state(model, PLAIN)
    one = jp.train_step(model, token_loss, PLAIN)
    placed = jax.device_put(jax.tree.map(lambda x: x[0], wanted), jax.devices()[0])
    want = mean(one.evaluate(State(alone.step, placed, alone.optimizer, alone.model_state), *batches(1)))
    assert mean(step.evaluate(met, *batches(1))) == pytest.approx(want, rel=1e-6)


@pytest.mark.nightly
def test_members_of_a_population_are_evaluated_each_by_its_own_state():
    def chain(rate):
        return optax.inject_hyperparams(optax.contrib.schedule_free_adamw)(learning_rate=rate, b1=0.8, eps=1e-4)

    rates = (0.01, 0.05)
    both = jp.Parallel(data=2, exchange=Population(values={"learning_rate": rates}))
    _, state, step = trained(MODEL, both, jax.devices()[:2], chain=chain(0.01), steps=3)
    found = step.evaluate(state, *batches(1))
    for member, rate in enumerate(rates):
        _, one, alone = trained(MODEL, jp.Parallel(), jax.devices()[:1], chain=chain(rate), steps=3)
        total, count = found[f"loss/{member}"]
        assert float(total / count) == pytest.approx(mean(alone.evaluate(one, *batches(1))), rel=1e-6)


# runs


JOB = """
[run]
dir = "{to}"
[model]
name = "decoder"
layers = 2
dim = 16
heads = 2
hidden = 32
[data]
source = "text"
path = "{text}"
seq = 16
tokenizer = "bytes"
[train]
steps = 6
global_batch = 8
eval_every = 3
{train}
[optimizer]
name = "schedule_free_adamw"
arguments = {{ b1 = 0.8, weight_decay = 0.01 }}
learning_rate = 0.02
warmup = 2
decay = "constant"
[checkpoint]
every = 3
keep_last = 3
[parallel]
data = 2
fsdp = 2
tensor = 2
"""


def job(folder, name, *overrides, train=""):
    (folder / "text.txt").write_text("the quick brown fox jumps over the lazy dog " * 40)
    return loads(JOB.format(to=folder / name, text=folder / "text.txt", train=train), overrides)


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    folder = tmp_path_factory.mktemp("free")
    for name, train in (("run", ""), ("tuned", 'adapters = {rank = 2, paths = ["blocks/mlp/*"]}')):
        run.train(job(folder, name, train=train), stream=io.StringIO())
    return folder


def saved(folder, *, step=6):
    """Returns what a checkpoint trains and what it evaluates, by optax, from the arrays in it."""
    path = listing.find(folder, step).resolve()
    found, alone = reading.read_manifest(path), jax.sharding.SingleDeviceSharding(jax.devices()[0])
    floats = {name: each for name, each in found.arrays.items() if not each.dtype.startswith("key<")}
    wanted = {name: jax.ShapeDtypeStruct(each.shape, each.dtype, sharding=alone) for name, each in floats.items()}
    arrays = jax.device_get(reading.read_arrays(path, found, wanted))
    params = {name.removeprefix("params/"): x for name, x in arrays.items() if name.startswith("params/")}
    evaluated = dict(params)
    for name, z in arrays.items():
        if "/z/" in name:
            state, _, path = name.partition("/z/")
            b1 = arrays[f"{state}/b1"]
            evaluated[path] = (params[path] - (1 - b1) * z) / b1
    return params, evaluated


@pytest.mark.nightly
@pytest.mark.xdist_group("free")
def test_a_run_evaluates_saves_resumes_and_ends_bit_for_bit(finished, tmp_path):
    whole = rows(finished / "run")
    run.train(job(tmp_path, "run", "train.steps=3"), stream=io.StringIO())
    with pytest.raises(JaxparError):
        run.train(job(tmp_path, "run", "optimizer.name=adamw", "optimizer.arguments={}"), stream=io.StringIO())
    run.train(job(tmp_path, "run"), stream=io.StringIO())
    timed = ("seconds", "tokens_per_second", "input_wait_seconds")
    plain = lambda found: [{k: v for k, v in row.items() if k not in timed} for row in found]  # noqa: E731
    assert plain(rows(tmp_path / "run")) == plain(whole)
    (_, one), (_, other) = saved(finished / "run"), saved(tmp_path / "run")
    assert all((one[path] == other[path]).all() for path in one)


@pytest.mark.nightly
@pytest.mark.xdist_group("free")
@pytest.mark.parametrize(
    "name", [pytest.param("run", marks=pytest.mark.full), pytest.param("tuned", marks=pytest.mark.slow)]
)
def test_a_run_is_exported_and_sampled_as_it_is_evaluated(name, finished, tmp_path):
    params, evaluated = saved(finished / name)
    assert max(np.abs(evaluated[path] - params[path]).max() for path in params) > 1e-3
    to = tmp_path / "exported"
    assert main(["checkpoint", "export", str(finished / name), "--format", "safetensors", "--to", str(to)]) == 0
    made = load(finished / name / "job.toml")
    if name == "tuned":
        frozen = [path for path in evaluated if not path.startswith("adapters/")]
        assert all((evaluated[path] == params[path]).all() for path in frozen)
        layout = jp.compose(resolve_model(made, jp.next_token_loss), jp.Parallel(), jax.devices()[:1])
        nested = nest({tuple(path.split("/")): jnp.asarray(each) for path, each in evaluated.items()})
        evaluated = jax.device_get(leaves_by_path(jp.merge_lora(layout, nested)))
    written = load_folder(to).params
    for path, wanted in evaluated.items():
        np.testing.assert_allclose(written[path][...], wanted, rtol=1e-6, atol=1e-7)
    for where in ((), ("parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2")):
        held = leaves_by_path(load_text_model(finished / name, SamplingRequest(overrides=where)).generator._values[0])
        for path, wanted in evaluated.items():
            np.testing.assert_allclose(held[path], wanted, rtol=1e-6, atol=1e-7)


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("name", some(CHAINS, ["ema"], []))
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_what_a_checkpoint_evaluates_is_made_by_one_program(name, dtype, tmp_path, caplog):
    layout = jp.compose(MODEL, jp.Parallel(), jax.devices()[:1])
    state, step = jp.init_state(layout, CHAINS[name], seed=1), jp.train_step(layout, token_loss, CHAINS[name])
    for batch in batches(2):
        state, _ = step(state, batch)
    store = Store(tmp_path / "checkpoints", Checkpoints())
    store.save(2, state, {})
    store.finish()
    path = listing.find(tmp_path, 2).resolve()
    params = {f"params/{each}": x for each, x in leaves_by_path(state.params).items()}
    wanted = {each: jax.ShapeDtypeStruct(x.shape, dtype, sharding=x.sharding) for each, x in params.items()}
    with jax.log_compiles():
        found = reading.read_evaluated(path, reading.read_manifest(path), wanted)
    assert len([each for each in caplog.messages if each.startswith("Finished XLA compilation of")]) == 1
    for each, x in leaves_by_path(state.eval_params).items():
        np.testing.assert_allclose(
            found[f"params/{each}"], x.astype(dtype), rtol=1e-6 if dtype == jnp.float32 else 1e-2
        )


@pytest.mark.nightly
def test_a_new_run_takes_what_another_evaluates(tmp_path):
    chain = CHAINS["schedule_free"]
    _, state, _ = trained(MODEL, jp.Parallel(**CUBE), chain=chain, steps=2)
    store = Store(tmp_path / "checkpoints", Checkpoints())
    store.save(2, state, {})
    store.finish()
    layout = jp.compose(MODEL, jp.Parallel(fsdp=4), jax.devices()[:4])
    begun, origin = start_from.start(Checkpoints(start_from=str(tmp_path)), jp.init_state(layout, PLAIN), layout, PLAIN)
    assert_same_arrays(begun.params, state.eval_params, 1e-6)
    assert f"{len(leaves_by_path(state.params))} of them as they are evaluated" in str(origin)
    again = jp.train_step(jp.compose(MODEL, jp.Parallel(fsdp=8)), token_loss, chain)
    assert_same_arrays(jp.restore(tmp_path / "checkpoints", again).params, state.params, 0)


def test_a_job_has_them_by_name(tmp_path):
    made = job(tmp_path, "run")
    assert check(made) == []
    rate = optax.join_schedules([optax.linear_schedule(0.0, 0.02, 2), optax.constant_schedule(0.02)], [2])
    wanted = optax.contrib.schedule_free_adamw(rate, b1=0.8, weight_decay=0.01)
    programs = [
        str(jax.make_jaxpr(partial(update, chain))(SMALL, jax.eval_shape(chain.init, SMALL), SMALL, LOSS))
        for chain in (resolve_optimizer(made), optax.chain(optax.clip_by_global_norm(1.0), wanted))
    ]
    assert programs[0] == programs[1]
    (problem,) = check(job(tmp_path, "run", "parallel.exchange.name=diloco"))
    assert "moves the parameters alone" in problem.rule
