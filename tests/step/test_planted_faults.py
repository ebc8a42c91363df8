"""Faults that give the right loss, or nearly: each was planted in the code, and each is seen here.

values                    dropout of a stage, the count of a loss, norms and moments of replicas
the program as traced     remat, what a forward keeps, the dtype of matmuls and of sums
the program as compiled   what travels and in which dtype, pieces of a sequence in a stage's buffers
"""

import dataclasses
import re
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import BATCH, DIM, HIDDEN, SEQ, VOCAB, Staged, assert_same_arrays, batches, token_loss

import jaxpar as jp
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.target import missing_plugin
from jaxpar.sharding.names import Compute

gpu_compiler = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


def shapes(batch=BATCH, seq=SEQ):
    tokens = jax.ShapeDtypeStruct((batch, seq), jnp.int32)
    return {"inputs": tokens, "targets": tokens, "mask": jax.ShapeDtypeStruct((batch, seq), jnp.float32)}


def lowered(model, parallel, precision="fp32", remat="none"):
    """Returns the text of a training step on simulated devices, as traced."""
    layout = jp.compose(model, parallel, jax.devices()[: devices(parallel)])
    step = jp.train_step(layout, token_loss, optax.sgd(0.1), precision=precision, remat=remat)
    return step.lower(step.abstract(), shapes()).as_text()


def devices(parallel):
    return parallel.pipe * parallel.data * parallel.fsdp * parallel.context


def products(text):
    """Returns the dtypes of the operands of each matrix product in a lowered program."""
    return re.findall(r"stablehlo\.dot_general[^:]*:.*?\(tensor<[\dx]*x(\w+)>, tensor<[\dx]*x(\w+)>\)", text)


def staged(**settings):
    return partial(Staged, layers=2, tied=False, **settings)


def pipe(context=1, **settings):
    return jp.Parallel(pipe=2, context=context, pipeline=jp.Pipeline(microbatches=4, **settings))


# --- values ---------------------------------------------------------------------------------------------------------


class Drawing(nnx.Module):
    """Two layers, each of which adds a coin of its own to every number, drawn inside of the stack."""

    def __init__(self, rngs):
        self.weight = nnx.Param(jnp.zeros((2, 1)), out_sharding=("layers", None))
        self.coins = nnx.Rngs(dropout=rngs.dropout())

    def __call__(self, x):
        return jp.pipelined(self.layers, x)

    def layers(self, x):
        coin = jax.random.bernoulli(self.coins.dropout(), 0.5, x.shape)
        return jax.lax.scan(lambda x, weight: (x + coin + 0 * weight, None), x, self.weight[...])[0]


def ones(model, batch):
    """Counts the numbers that one layer of two added to."""
    y = model(jnp.zeros((*batch["inputs"].shape, 16)))
    return {"loss": (jnp.sum(y), jnp.float32(y.size)), "ones": (jnp.sum(y == 1.0), jnp.float32(y.size))}


def test_stages_draw_different_numbers():
    layout = jp.compose(Drawing, pipe(), jax.devices()[:2])
    step = jp.train_step(layout, ones, optax.sgd(0.1))
    _, metrics = step(jp.init_state(layout, optax.sgd(0.1)), next(batches(1)))
    assert 0.4 < float(metrics["ones"]) < 0.6  # 0 where both stages draw the same


def weighing(model, batch):
    """Counts by a parameter, as a model does that weighs its own examples."""
    losses = jnp.square(model(batch["inputs"]))
    return jnp.sum(losses), jnp.sum(jnp.square(model.embed.embedding[...]))


@pytest.mark.parametrize(
    "parallel",
    [pytest.param(jp.Parallel(data=2), marks=pytest.mark.slow), jp.Parallel(fsdp=2)],
    ids=["data 2", "fsdp 2"],
)
def test_the_count_of_a_loss_is_not_differentiated(parallel):
    (batch,) = batches(1)
    layout = jp.compose(staged(), parallel, jax.devices()[:2])
    state, step = jp.init_state(layout, optax.sgd(0.1)), jp.train_step(layout, weighing, optax.sgd(0.1))
    before = jax.device_get(state.params)

    def total(params):
        return weighing(layout.blueprint.bind(params, state.model_state, lambda path, value: value, Compute()), batch)[
            0
        ]

    count = np.sum(np.square(before["embed"]["embedding"]))
    wanted = jax.tree.map(lambda w, g: w - 0.1 * g / count, before, jax.jit(jax.grad(total))(before))
    assert_same_arrays(step(state, batch)[0].params, wanted)


MOMENTUM = optax.sgd(0.02, momentum=0.9)


@cache
def unflushed(data):
    parallel = jp.Parallel(pipe=2, data=data, pipeline=jp.Pipeline(schedule="1f1b", microbatches=4, weights="stash"))
    layout = jp.compose(staged(), parallel, jax.devices()[: 2 * data])
    step = jp.train_step(layout, token_loss, MOMENTUM)
    return step(jp.init_state(layout, MOMENTUM, seed=1), next(batches(1)))


@pytest.mark.nightly
def test_replicas_of_a_stage_count_once_in_the_norm_of_its_gradients():
    """With weights that change within the step; the microbatches of two replicas are those of one."""
    np.testing.assert_allclose(unflushed(2)[1]["grad_norm"], unflushed(1)[1]["grad_norm"], rtol=1e-5)


def test_moments_are_those_of_the_stage_that_has_the_parameter():
    """Without momentum there would be: what an update subtracts is the sum of the traces that it went through."""
    state, _ = unflushed(1)
    trace = next(x for x in state.optimizer if hasattr(x, "trace")).trace
    for name, own in trace.items():
        assert all(float(jnp.abs(leaf).max()) > 0 for leaf in jax.tree.leaves(own)), name


# --- the program as traced ------------------------------------------------------------------------------------------

DECODER = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=2, dim=DIM, heads=2, hidden=HIDDEN)
UNROLLED = dataclasses.replace(DECODER, scan=False)
REMATERIALIZED = {
    "a model that places none": (staged(), jp.Parallel(data=2)),
    "jaxpar's own": (partial(jp.Decoder, DECODER), jp.Parallel(data=2)),
    "jaxpar's own, unrolled": (partial(jp.Decoder, UNROLLED), jp.Parallel(data=2)),
    "a stage of a model that places none": (staged(), pipe(keep="residuals")),
    "a stage of jaxpar's own": (partial(jp.Decoder, DECODER), pipe(keep="residuals")),
}


@pytest.mark.parametrize("case", some(REMATERIALIZED, ["jaxpar's own, unrolled"]))
def test_remat_computes_again(case):
    model, parallel = REMATERIALIZED[case]
    kept, again = (len(products(lowered(model, parallel, remat=remat))) for remat in ("none", "full"))
    assert again > kept


def test_residuals_are_kept_and_not_computed_again():
    kept, again = (len(products(lowered(staged(), pipe(keep=keep)))) for keep in ("residuals", "inputs"))
    assert again >= kept + 2  # up and down of a layer, once more in every backward that is compiled


class Raw(nnx.Module):
    """Multiplies by parameters itself: no layer of Flax's casts them."""

    def __init__(self, rngs):
        def weight(rows, columns):
            return nnx.Param(jax.random.normal(rngs.params(), (rows, columns)) / rows)

        self.embed, self.head = weight(VOCAB, DIM), weight(DIM, VOCAB)
        self.blocks = nnx.Param(
            jax.random.normal(rngs.params(), (2, DIM, DIM)) / DIM, out_sharding=("layers", None, None)
        )

    def __call__(self, tokens):
        x = self.embed[...][tokens]
        return jp.pipelined(self.layers, x) @ self.head[...]

    def layers(self, x):
        return jax.lax.scan(lambda x, w: (x + jnp.tanh(x @ w), None), x, self.blocks[...])[0]


@pytest.mark.parametrize("head", ["last", pytest.param("spread", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "model", [pytest.param(staged(), marks=pytest.mark.slow), Raw], ids=["of Flax's layers", "of raw weights"]
)
def test_every_product_of_a_pipeline_is_in_bf16(model, head):
    found = products(lowered(model, pipe(head=head), precision="bf16"))
    assert set(found) == {("bf16", "bf16")}


def test_gradients_in_bf16_are_summed_in_float32():
    """In the loops of a table, where a stage of one layer carries its weights in bf16 and their gradients' sum."""
    text = lowered(staged(), pipe(), precision="bf16")
    carried = "\n".join(line for line in text.splitlines() if "stablehlo.while" in line)
    assert f"tensor<1x1x{DIM}x{HIDDEN}xf32>" in carried
    assert f"tensor<{VOCAB}x{DIM}xf32>" in carried


# --- the program as compiled ----------------------------------------------------------------------------------------


def compiled(parallel, *, layers=2, dim=128, **numerics):
    """Returns the report of a step as compiled for eight H100s, and the bytes of a stack of weights in float32."""
    model = partial(Staged, layers=layers, tied=False, vocab=256, dim=dim, hidden=2 * dim)
    layout = jp.compose(model, parallel, jp.target_devices("h100:1x8"))
    step = jp.train_step(layout, token_loss, optax.sgd(0.1), **numerics)
    return jp.inspect(step, shapes(16, 32)), 4 * layers * dim * 2 * dim


FSDP = {"fsdp 8": jp.Parallel(fsdp=8), "pipe 2 x fsdp 4": jp.Parallel(pipe=2, fsdp=4, pipeline=pipe().pipeline)}


@gpu_compiler
@pytest.mark.parametrize("layout", some(FSDP, ["fsdp 8"]))
def test_bf16_weights_are_cast_before_they_are_gathered(layout):
    report, size = compiled(FSDP[layout], precision="bf16")
    gathered = [e for e in report.ledger if e.kind == "all-gather" and e.payload > 4096]
    assert {e.dtype for e in gathered} == {"bf16"}
    assert sum(e.step_payload for e in gathered) >= size / FSDP[layout].pipe  # two matrices, two bytes a weight


@gpu_compiler
def test_gradients_of_hsdp_are_scattered_first_and_shards_reduced_between_replicas():
    """But for the table that is looked up, which XLA sums over both axes at once."""
    report, _ = compiled(jp.Parallel(data=2, fsdp=4))
    whole = sum(e.step_payload for e in report.ledger if e.kind == "all-reduce" and e.axis == "data,fsdp")
    assert whole <= 1.01 * 4 * 256 * 128
    assert any(e.kind == "all-reduce" and e.axis == "data" and "blocks" in e.cause for e in report.ledger)


def test_a_stage_keeps_its_piece_of_the_sequence():
    parallel = pipe(context=2)
    layout = jp.compose(staged(), parallel, jax.devices()[:4])
    step = jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))
    batch = {name: value for name, value in shapes().items() if name != "mask"}
    text = compile_program(step.lower(step.abstract(), batch), jax.devices()[:4]).text
    slots = re.findall(rf"f32\[(\d+),{BATCH // 4},(\d+),{DIM}\]", text)
    assert slots
    assert {int(seq) for _, seq in slots} == {SEQ // 2}
