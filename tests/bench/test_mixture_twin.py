"""The mixture twin trains the same model as jaxpar, and jaxpar's step costs no more, as compiled for eight H100s."""

import hashlib
from dataclasses import replace
from functools import cache, partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from bench import mixture_twin as twin
from jaxpar.inspector.report import build_report
from jaxpar.inspector.subject import from_function, step_subject
from jaxpar.step import unpipelined

FROZEN = "fb5170fa61ee3e3d1c311ca034ec2d8457224b182c556abc1d4d74a874673e85"
TINY = twin.Mixture(vocab=64, seq=16, layers=2, dim=16, heads=2, experts=8, hidden=32, dtype="float32")
# 4,096 tokens of a device: 1.6 TFLOP of its step, mostly matmuls
LARGE = twin.Mixture(vocab=8192, seq=1024, layers=4, dim=1024, heads=8, experts=16, hidden=1024)
ADAM = partial(optax.adamw, 1e-2, b2=0.95)
LAYOUTS = [{"expert": 8}, {"expert": 4, "data": 2}]
PRECISION = {"float32": "fp32", "bfloat16": "bf16"}
NUMBERS = 1024  # bytes of all-reduces that carry metrics and the norm, and no array


def step_of_jaxpar(model, sizes, devices=None):
    shape = {name: getattr(model, name) for name in ("vocab", "seq", "layers", "dim", "heads", "hidden")}
    experts = {"count": model.experts, "per_token": model.per_token, "capacity": model.capacity}
    config = jp.DecoderConfig(**shape, experts=experts | {"balance": model.balance})
    layout = jp.compose(partial(jp.Decoder, config), jp.Parallel(**sizes), devices)
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), ADAM())
    return jp.train_step(layout, jp.next_token_loss, optimizer, precision=PRECISION[model.dtype]), optimizer


def fused(params):
    """The parameters of a Decoder as the twin stores them."""
    blocks = params["blocks"]
    attention, mlp = blocks["attention"], blocks["mlp"]
    norms = jnp.stack([blocks["norm_attention"]["scale"], blocks["norm_mlp"]["scale"]], axis=1)
    width = params["embed"].shape[1]
    return {
        "table": params["embed"],
        "qkv": jnp.stack([attention[name] for name in ("query", "key", "value")], axis=2),
        "out": attention["out"].reshape(len(norms), -1, width),
        "router": mlp["router"],
        "gate_up": jnp.stack([mlp["gate"], mlp["up"]], axis=3),
        "down": mlp["down"],
        "norms": jnp.concatenate([norms.reshape(-1, width), params["norm"]["scale"][None]]),
        "head": params["head"],
    }


def batches(model, rows=16, count=3):
    # few different tokens: some experts overflow
    tokens = np.random.default_rng(0).zipf(1.3, (count, rows, model.seq + 1)).astype(np.int32) % model.vocab
    return [{"inputs": x[:, :-1], "targets": x[:, 1:]} for x in tokens]


def metrics_of_both(model, sizes):
    """Parameters that jaxpar initializes, and the metrics of some steps of both."""
    step, optimizer = step_of_jaxpar(model, sizes)
    state, rows, expected = jp.init_state(step.layout, optimizer), [], []
    params = jax.tree.map(np.array, fused(state.params))  # copies: the step is given the state for good
    mesh = twin.make_mesh(jax.devices(), **sizes)
    places, moments = twin.shardings(model, ADAM(), mesh)
    theirs = jax.device_put(params, places), jax.jit(ADAM().init, out_shardings=moments)(params)
    step_by_hand = twin.build(model, ADAM(), mesh)
    for batch in batches(model):
        state, metrics = step(state, batch)
        theirs, others = step_by_hand(theirs, batch["inputs"], batch["targets"])
        expected.append({name: float(value) for name, value in others.items()})
        rows.append({name: float(metrics[name]) for name in others})
    return rows, expected


def test_the_twin_is_frozen():
    """It is a yardstick: a change of jaxpar does not change it, and a faster twin is a new hash, with new figures."""
    assert hashlib.sha256(Path(twin.__file__).read_bytes()).hexdigest() == FROZEN


@pytest.mark.nightly
@pytest.mark.parametrize(
    "sizes", [{"expert": 4, "data": 2}, pytest.param({"expert": 8}, marks=pytest.mark.full)], ids=["4 x data 2", "8"]
)
def test_the_twin_has_the_losses_loads_and_gradient_norms_of_the_decoder(sizes):
    rows, expected = metrics_of_both(TINY, sizes)
    assert expected[0]["dropped"] > 0.01
    for row, other in zip(rows, expected, strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.full
def test_sums_over_data_that_wait_as_on_gpus_are_those_of_the_twin(monkeypatch):
    monkeypatch.setattr(unpipelined, "_cut_by_expert", lambda layout: layout.sizes["expert"] > 1)
    for row, other in zip(*metrics_of_both(TINY, {"expert": 4, "data": 2}), strict=True):
        assert row == pytest.approx(other, rel=1e-5)


@pytest.mark.full
def test_in_16_bits_the_twin_has_the_losses_of_the_decoder():
    """Up to rounding, after which a few tokens choose another expert."""
    for row, other in zip(*metrics_of_both(replace(TINY, dtype="bfloat16"), {"expert": 8}), strict=True):
        assert row["loss"] == pytest.approx(other["loss"], rel=2e-3)


def compiled(model, sizes, rows):
    """The reports of jaxpar's step and the twin's, compiled for eight absent H100s with the same options of XLA."""
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    devices = jp.target_devices("h100:1x8")
    step, _ = step_of_jaxpar(model, sizes, devices)
    tokens = jax.ShapeDtypeStruct((rows, model.seq), jnp.int32)
    ours = step_subject(step, {"inputs": tokens, "targets": tokens})
    mesh = twin.make_mesh(devices, **sizes)
    params = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in model.shapes().items()}
    state = jax.tree.map(
        lambda x, on: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=on),
        (params, jax.eval_shape(ADAM().init, params)),
        twin.shardings(model, ADAM(), mesh),
    )
    tokens = jax.ShapeDtypeStruct(tokens.shape, tokens.dtype, sharding=twin.NamedSharding(mesh, twin.P(twin.AXES)))
    by_hand = twin.build(model, ADAM(), mesh), (state, tokens, tokens), {}
    theirs = from_function(*by_hand, roles=("parameters", "batch", "batch"), mesh=None)
    return build_report(ours), build_report(replace(theirs, compiler_options=ours.compiler_options))


@cache
def reports(number):
    return compiled(LARGE, LAYOUTS[number], 32)


def wire(report):
    """Bytes that a device sends, by axes and kind of collective."""
    return {(axes, kind): size for axes, kinds in report.by_axis.items() for kind, size in kinds.items()}


def temporary(report):
    return sum(share.bytes for share in report.memory if share.how == "compiled")


ALONE, REPLICAS = 0, 1  # numbers of `LAYOUTS`
NEWEST = jax.__version_info__ >= (0, 12)  # of whose XLA the bounds are
OLDER = () if NEWEST else (ALONE, REPLICAS)
NEWER = (ALONE,) if NEWEST else ()
MEMORY = "0.06 % more (expert=8): casts of shards that the loop gathers; 0.09 % (expert=4, data=2)"


def layouts(*broken, reason):
    """Both layouts; strict: a bound that begins to hold is an error until its mark is removed."""
    missed = pytest.mark.xfail(strict=True, raises=AssertionError, reason=reason)
    numbers = [pytest.param(number, marks=[missed] if number in broken else []) for number in (ALONE, REPLICAS)]
    return pytest.mark.parametrize("number", numbers, ids=["expert 8", "expert 4 x data 2"])


@pytest.mark.full
@layouts(reason="")
def test_arrays_travel_in_the_bytes_of_the_twin(number):
    ours, theirs = map(wire, reports(number))
    numbers = {key for key in ours if key[1] == "all-reduce" and max(ours[key], theirs[key]) <= NUMBERS}
    assert all(ours.pop(key) > 0 < theirs.pop(key) for key in numbers)
    assert ours == theirs


@pytest.mark.full
@layouts(reason="")
def test_the_flop_are_those_of_the_twin(number):
    ours, theirs = reports(number)
    assert ours.flop.total == theirs.flop.total


@pytest.mark.full
@layouts(*NEWER, REPLICAS, reason=MEMORY)
def test_temporary_memory_is_at_most_the_twins(number):
    ours, theirs = map(temporary, reports(number))
    assert ours <= theirs


@pytest.mark.full
@layouts(*OLDER, reason="with jax 0.10.2 the modelled step is 1.04 of the twin's")
def test_the_modelled_step_takes_at_most_a_hundredth_more_than_the_twins(number):
    ours, theirs = reports(number)
    assert ours.timeline.seconds <= 1.01 * theirs.timeline.seconds
