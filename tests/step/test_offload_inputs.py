"""remat = "offload": the numbers of "full", the inputs of layers in host memory, and a refusal where nothing scans."""

from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some
from tiny import BATCH, DIM, SEQ, VOCAB, Annotated

import jaxpar as jp
from jaxpar.mesh.target import missing_plugin
from jaxpar.step.block_inputs import offload_block_inputs

absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
TINY = jp.DecoderConfig(vocab=VOCAB, seq=SEQ, layers=2, dim=DIM, heads=2, hidden=32)


class Layer(nn.Module):
    @nn.compact
    def __call__(self, x, _):
        return x + nn.Dense(DIM)(jnp.tanh(x)), None


class Linen(nn.Module):
    @nn.compact
    def __call__(self, tokens):
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        x, _ = layers()(nn.Embed(VOCAB, DIM)(tokens), None)
        return nn.Dense(VOCAB)(x)


MODELS = {
    "decoder": partial(jp.Decoder, TINY),
    "nnx.scan": Annotated,
    "nn.scan": jp.from_linen(Linen(), jnp.zeros((1, SEQ), jnp.int32)),
}


@cache
def losses(model, remat, **told):
    tokens = np.arange(BATCH * (SEQ + 1), dtype=np.int32).reshape(BATCH, SEQ + 1) * 7 % VOCAB
    layout, optimizer = jp.compose(MODELS[model], jp.Parallel(fsdp=8)), optax.adamw(1e-2)
    state, step = (
        jp.init_state(layout, optimizer),
        jp.train_step(layout, jp.next_token_loss, optimizer, remat=remat, **told),
    )
    found = []
    for _ in range(3):
        state, metrics = step(state, {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]})
        found.append(float(metrics["loss"]))
    return found


@pytest.mark.spread(0)
@pytest.mark.parametrize("model", some(MODELS, [], ["decoder", "nn.scan"]))
def test_losses_are_those_of_full_to_the_bit(model):
    assert losses(model, "offload") == losses(model, "full")


def test_a_model_without_a_scan_is_refused_with_the_way_out():
    class Flat(nnx.Module):
        def __init__(self, rngs):
            self.table = nnx.Embed(VOCAB, DIM, rngs=rngs)

        def __call__(self, tokens):
            return self.table.attend(self.table(tokens))

    batch = {name: np.zeros((8, SEQ), np.int32) for name in ("inputs", "targets")}
    for model in (Flat, partial(jp.Decoder, jp.DecoderConfig(**{**vars(TINY), "scan": False}))):
        layout, optimizer = jp.compose(lambda rngs, model=model: model(rngs=rngs), jp.Parallel(fsdp=8)), optax.sgd(1.0)
        step = jp.train_step(layout, jp.next_token_loss, optimizer, remat="offload")
        with pytest.raises(jp.JaxparError, match=r'no scan over stacked layers(?s:.*)remat="full"'):
            step.lower(step.abstract(), batch)


def test_a_constant_that_a_model_copies_is_no_stack():
    def model(layers, x):
        return jax.lax.scan(lambda x, w: (x @ w, None), x, layers)[0] * jnp.array(jnp.float32(3.0))

    layers, x = jnp.ones((2, 2, 2)), jnp.ones((2, 2))
    np.testing.assert_array_equal(offload_block_inputs(model, "mine")(layers, x), model(layers, x))


def test_a_pipeline_is_refused_with_the_way_out():
    layout = jp.compose(partial(jp.Decoder, TINY), jp.Parallel(pipe=2, fsdp=4, pipeline=jp.Pipeline(microbatches=2)))
    with pytest.raises(jp.JaxparError, match='keep="inputs"'):
        jp.train_step(layout, jp.next_token_loss, optax.sgd(1.0), remat="offload")


@pytest.mark.nightly
@absent
def test_the_device_is_rid_of_the_inputs_of_layers_and_the_host_has_them():
    layers, rows, seq, dim = 8, 8, 1024, 256
    settings = jp.DecoderConfig(vocab=256, seq=seq, layers=layers, dim=dim, heads=2, hidden=256)
    batch = {name: jax.ShapeDtypeStruct((8 * rows, seq), jnp.int32) for name in ("inputs", "targets")}
    took = {}
    for remat in ("full", "offload"):
        layout = jp.compose(partial(jp.Decoder, settings), jp.Parallel(data=8), jp.target_devices("h100:1x8"))
        step = jp.train_step(layout, jp.next_token_loss, optax.sgd(1e-3), precision="bf16", remat=remat)
        found = jp.inspect(step, batch)
        took[remat] = found.total, found.host
        told = [note for note in found.notes if "host memory" in note]
        assert bool(told) == (remat == "offload")
    inputs = 2 * layers * rows * seq * dim
    # one input stays on the device, for the layer whose turn it is; gradients are stacked in 16 bits, and in 32 where a
    # layer with remat casts its weights
    saved, stacks = took["full"][0] - took["offload"][0], 2 * layers * 7 * dim**2
    assert 0.98 * inputs * (layers - 1) / layers < saved < 1.02 * inputs * (layers - 1) / layers + stacks
    assert took["full"][1] == 0
    assert took["offload"][1] == pytest.approx(inputs, rel=0.02)
    assert (
        "32 MiB of temporary arrays are in host memory, per device (compiled); over PCIe they take 0.655 ms" in told[0]
    )
