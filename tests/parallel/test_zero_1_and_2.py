"""ZeRO-1 and 2 keep shards of the parameters between steps, and gather them once a step as the step computes with them.

What travels is read off programs compiled for eight GPUs that are not there; numbers are those of one device.
"""

import itertools
from collections import defaultdict
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import Annotated, Staged, assert_same_arrays, batches, on_one_device, optimizer, token_loss, train

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.mesh.target import missing_plugin
from jaxpar.step.frozen_parameters import Reads, count_reads

absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
LAYERS, DIM, HIDDEN, VOCAB, SEQ = 4, 256, 512, 1024, 128
WIDE = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=LAYERS, dim=DIM, heads=8, hidden=HIDDEN, gated=True)
SMALL = jp.DecoderConfig(vocab=32, seq=8, layers=2, dim=16, heads=4, hidden=32, tied=True)
EXACT = {"rel": 2e-3}
BF16 = 2


def look(model, parallel, *, rows=32, **numerics):
    layout = jp.compose(model, parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3), precision="bf16", **numerics)
    shape = jax.ShapeDtypeStruct((rows, SEQ), jnp.int32)
    found = jp.inspect(step, {"inputs": shape, "targets": shape})
    return found, sum(place.leaf.size for place in layout.placements.values())


def moved(report, axis="fsdp"):
    """Returns kind to (dtypes, payload bytes of a step) over an axis, scalars left out."""
    kinds = defaultdict(lambda: (set(), 0))
    for entry in report.ledger:
        if entry.axis == axis and entry.payload > 64:
            dtypes, size = kinds[entry.kind]
            kinds[entry.kind] = (dtypes | {entry.dtype}, size + entry.step_payload)
    return dict(kinds)


def said(report, kind):
    return [flag for flag in report.flags if flag.kind == kind]


@absent
@pytest.mark.parametrize(("zero", "accumulate"), some(itertools.product((1, 2), (1, 4)), [], [(1, 4)]))
def test_parameters_are_gathered_once_a_step_in_bf16(zero, accumulate):
    """Gradients travel as before: in the dtype in which products leave them, once for every microbatch."""
    found, count = look(partial(jp.Decoder, WIDE), jp.Parallel(fsdp=8, zero=zero), accumulate=accumulate)
    over = moved(found)
    assert over["all-gather"] == ({"bf16"}, pytest.approx(BF16 * count, **EXACT))
    gathers = [entry for entry in found.ledger if entry.kind == "all-gather" and entry.payload > 64]
    assert {(entry.times, entry.loop) for entry in gathers} == {(1, ())}
    reduced = sum(size for kind, (_, size) in over.items() if kind != "all-gather")
    if (zero, accumulate) != (1, 4):  # there XLA adds up some of what is outside of the layers before it reduces it
        assert reduced == pytest.approx(accumulate * BF16 * count, **EXACT)
    assert not said(found, "wide wire")
    assert not said(found, "unsharded gradient")


@pytest.mark.nightly
@absent
@pytest.mark.parametrize("zero", [pytest.param(1, marks=pytest.mark.full), 2])
def test_parameters_are_gathered_in_bf16_around_the_table_of_a_pipeline(zero):
    """Its gradients are summed in float32, and reduced so."""
    model = partial(Staged, layers=LAYERS, tied=False, vocab=VOCAB, dim=DIM, hidden=HIDDEN)
    found, count = look(model, jp.Parallel(pipe=2, fsdp=4, zero=zero), rows=32)
    stage = count - LAYERS // 2 * 2 * DIM * HIDDEN  # half of the layers, and all that is outside of them
    over = moved(found)
    assert over["all-gather"] == ({"bf16"}, pytest.approx(BF16 * stage, **EXACT))
    assert {dtype for kind, (dtypes, _) in over.items() if kind != "all-gather" for dtype in dtypes} == {"f32"}
    assert not said(found, "wide wire")


@pytest.mark.slow
@absent
def test_evaluation_gathers_them_once_in_bf16():
    layout = jp.compose(partial(jp.Decoder, WIDE), jp.Parallel(fsdp=8, zero=1), jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, jp.next_token_loss, optax.adamw(1e-3), precision="bf16")
    state, shape = step.abstract(), jax.ShapeDtypeStruct((32, SEQ), jnp.int32)
    batch = {name: step.placement.shape_struct(name, shape) for name in ("inputs", "targets")}
    with step.compiler.trace_context():
        found = jp.inspect(step.evaluation, state.params, state.model_state, batch, mesh=layout.mesh)
    count = sum(place.leaf.size for place in layout.placements.values())
    assert moved(found)["all-gather"] == ({"bf16"}, pytest.approx(BF16 * count, **EXACT))


MODELS = {"user's": Annotated, "decoder": partial(jp.Decoder, SMALL)}


def next_token(model, batch):
    return jp.next_token_loss(model, {name: batch[name] for name in ("inputs", "targets")})


LOSSES = {"user's": token_loss, "decoder": next_token}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "precision", "zero", "accumulate"),
    some(
        [(*each, *ways) for each in itertools.product(MODELS, ("fp32", "bf16")) for ways in ((1, 2), (2, 1))],
        [("user's", "fp32", 1, 2)],
        [("decoder", "bf16", 1, 2)],
    ),
)
def test_shards_between_steps_train_as_one_device(name, zero, precision, accumulate):
    numerics = {"precision": precision, "accumulate": accumulate, "loss": LOSSES[name], "steps": 3}
    want, expected, _ = on_one_device(MODELS[name], **numerics)
    got, state, _ = train(MODELS[name], jp.Parallel(fsdp=8, zero=zero), **numerics)
    tolerance = {"fp32": 1e-5, "bf16": 1e-2}[precision]
    np.testing.assert_allclose(got, want, rtol=tolerance)
    assert_same_arrays(state.params, expected.params, tolerance)
    for array in jax.tree.leaves(state.params):
        assert array.dtype == jnp.float32
        assert array.addressable_shards[0].data.size * 8 == array.size


class Repeated(nnx.Module):
    """Reads one weight in every turn of a loop, so that its gradient is a sum of a thousand."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.ones((8, 8)))

    def __call__(self, x):
        def turn(total, _):
            return total + x @ self.weight[...].astype(x.dtype), None

        return jax.lax.scan(turn, jnp.zeros_like(x), None, length=1000)[0]


@pytest.mark.parametrize("zero", [1, 2])
def test_the_gradient_of_what_a_loop_reads_is_summed_in_float32(zero):
    """In bfloat16 a sum of ones stays at 256."""

    def loss(model, batch):
        y = model(batch["x"].astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.sum(y), jnp.float32(y.size)

    def data(steps):
        return [{"x": np.ones((8, 8), np.float32)}] * steps

    _, state, _ = train(
        Repeated, jp.Parallel(fsdp=8, zero=zero), chain=optax.sgd(1.0), loss=loss, data=data, steps=1, precision="bf16"
    )
    np.testing.assert_allclose(1 - np.asarray(state.params["weight"]), 1000 / 8, rtol=1e-5)


def test_what_a_program_does_with_a_parameter_is_counted():
    params = {name: jnp.ones((4, 4)) for name in ("once", "tied", "turns", "stack", "penalty", "unread")}

    def forward(params, x):
        read = lambda name, value=None: (params[name] if value is None else value).astype(jnp.bfloat16)  # noqa: E731
        _ = read("once")  # a look at its shape, say: nothing follows from it
        x = x @ read("once") @ read("tied") @ read("tied")
        x = jax.lax.scan(lambda x, _: (x @ read("turns"), None), x, None, length=3)[0]
        layer = jax.checkpoint(lambda x, row: x * read("", row))
        x = jax.lax.scan(lambda x, row: (layer(x, row), row), x, params["stack"])[0]
        return jnp.sum(x * read("penalty")) + jnp.sum(params["penalty"] ** 2).astype(x.dtype)

    assert count_reads(forward, params, jnp.ones((4, 4), jnp.bfloat16), dtype=jnp.bfloat16) == {
        "once": Reads(casts=1),
        "tied": Reads(casts=2),
        "turns": Reads(casts=2),
        "stack": Reads(casts=1),
        "penalty": Reads(casts=1, other_reads=1),
        "unread": Reads(),
    }


@pytest.mark.slow
def test_a_penalty_reads_the_float32_parameters():
    """Not a copy of 8 bits: a weight's own square is its gradient's half."""

    def loss(model, batch):
        squares = sum(jnp.sum(value**2) for value in jax.tree.leaves(nnx.state(model, nnx.Param)))
        return squares.astype(jnp.float32) * batch["x"].shape[0], jnp.float32(batch["x"].shape[0])

    def model(rngs):
        return nnx.Linear(8, 8, use_bias=False, rngs=rngs)

    def data(steps):
        return [{"x": np.ones((8, 8), np.float32)}] * steps

    ways = {"chain": optax.sgd(0.1), "loss": loss, "data": data, "steps": 2, "precision": "bf16"}
    want, _, _ = on_one_device(model, **ways)
    got, _, _ = train(model, jp.Parallel(fsdp=8, zero=1), **ways)
    np.testing.assert_allclose(got, want, rtol=1e-6)


RING = {"zero 1": (8, 1), "zero 3": (8, 3), "zero 0": (8, 0), "zero 1 again": (8, 1)}


@pytest.mark.slow
def test_a_checkpoint_of_zero_1_goes_on_under_zero_3_under_0_and_back(tmp_path):
    chain, step_of = optimizer(), {}
    for name, (fsdp, zero) in RING.items():
        layout = jp.compose(Annotated, jp.Parallel(fsdp=fsdp, zero=zero))
        step_of[name] = jp.train_step(layout, token_loss, chain)
    given = list(batches(len(RING)))
    want, _, _ = on_one_device(Annotated, steps=len(RING))
    state = jp.init_state(step_of["zero 1"].layout, chain, seed=1)
    for number, (name, step) in enumerate(step_of.items()):
        if number:
            state, at = Store(tmp_path, Checkpoints()).restore(step.abstract())
            assert at == number, name
        state, metrics = step(state, given[number])
        np.testing.assert_allclose(float(metrics["loss"]), want[number], rtol=1e-5, err_msg=name)
        store = Store(tmp_path, Checkpoints())
        store.save(number + 1, state, {})
        store.finish()


@pytest.mark.parametrize("sizes", [{"data": 2}, {"fsdp": 2}], ids=str)
def test_a_penalty_reads_biases_as_they_are_stored_on_every_layout(sizes):
    """Small vectors are gathered cast, in 16 bits, where a loss reads them by the model alone."""
    seen = {}

    def loss(model, batch):
        leaves = jax.tree.leaves(nnx.state(model, nnx.Param))
        seen.update({leaf.ndim: leaf.dtype for leaf in leaves})
        penalty = sum(jnp.sum(jnp.square(leaf)) for leaf in leaves)
        return jnp.sum(model(batch["x"])).astype(jnp.float32) + penalty, batch["x"].shape[0]

    layout = jp.compose(lambda rngs: nnx.Linear(16, 64, rngs=rngs), jp.Parallel(**sizes), jax.devices()[:2])
    step = jp.train_step(layout, loss, optax.sgd(0.1), precision="bf16")
    step.lower(step.abstract(), {"x": jax.ShapeDtypeStruct((8, 16), jnp.float32)})
    assert seen == {1: jnp.float32, 2: jnp.float32}
