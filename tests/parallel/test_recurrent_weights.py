"""Weights that a loop over tokens reads whole in each iteration: their gradients are reduced once, after the loop."""

from functools import partial
from itertools import product

import jax
import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some

import jaxpar as jp
from jaxpar.jaxprs.whole_gradient_sums import keep_accumulated_whole
from jaxpar.mesh.target import missing_plugin
from jaxpar.step import unpipelined

VOCAB, DIM = 64, 32


class Recurrent(nnx.Module):
    """A language model of Flax's own recurrent cell."""

    def __init__(self, rngs, cell=nnx.LSTMCell, vocab=VOCAB, dim=DIM):
        self.embed, self.head = nnx.Embed(vocab, dim, rngs=rngs), nnx.Linear(dim, vocab, rngs=rngs)
        self.rnn = nnx.RNN(cell(dim, dim, rngs=rngs))

    def __call__(self, tokens):
        return self.head(self.rnn(self.embed(tokens)))


class ClosedOver(nnx.Module):
    """A cell written by hand: the loop closes over its weight, which a sum of its squares reads too."""

    def __init__(self, rngs, vocab=VOCAB, dim=DIM):
        self.embed, self.head = nnx.Embed(vocab, dim, rngs=rngs), nnx.Linear(dim, vocab, rngs=rngs)
        self.weight = nnx.Linear(dim, dim, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens).swapaxes(0, 1)
        kernel = self.weight.kernel[...]

        def cell(state, x):
            state = jnp.tanh(x + state @ kernel)
            return state, state

        _, states = jax.lax.scan(cell, jnp.zeros_like(x[0]), x)
        return self.head(states.swapaxes(0, 1)) * (1 + 1e-3 * jnp.mean(kernel**2))


class Linen(nn.Module):
    """The same with Linen, whose cell has one matrix for all gates."""

    vocab: int = VOCAB
    dim: int = DIM

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(self.vocab, self.dim)(tokens)
        return nn.Dense(self.vocab)(nn.RNN(nn.OptimizedLSTMCell(self.dim))(x))


def linen(**sizes):
    return jp.from_linen(Linen(**sizes), np.zeros((1, 16), np.int32))


MODELS = {"nnx": Recurrent, "closed over": ClosedOver, "linen": linen}


def loss(model, batch):
    logits = jax.nn.log_softmax(model(batch["x"]).astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(logits, batch["y"][..., None], -1))


LAYOUTS = {
    "fsdp 8": {"fsdp": 8},
    "fsdp 8, zero 1": {"fsdp": 8, "zero": 1},
    "data 2 x fsdp 4": {"data": 2, "fsdp": 4},
    "2x2x2": {"data": 2, "fsdp": 2, "tensor": 2},
}
TRAINED = [*product(MODELS, LAYOUTS)]
COMPILED = [(name, layout) for name, layout in TRAINED if layout != "2x2x2"]  # gates of Flax's cells over tensor


@pytest.mark.parametrize(
    ("name", "layout"), some(TRAINED, [("closed over", "fsdp 8")], [("nnx", "2x2x2"), ("linen", "fsdp 8")])
)
@pytest.mark.filterwarnings("ignore:.*each device computes")  # a cell of Flax names no dim that tensor could split
def test_recurrent_models_train_as_on_one_device(name, layout):
    model, generator = MODELS[name], np.random.default_rng(0)
    batch = {key: generator.integers(0, VOCAB, (8, 16)).astype(np.int32) for key in ("x", "y")}
    of = Linen() if name == "linen" else model
    model = linen() if name == "linen" else model
    optimizer = optax.sgd(0.3)  # Adam would divide a gradient near 0 by itself
    reference = plain_loop.train(model, of, loss, optimizer, batch)
    composed = jp.compose(model, jp.Parallel(**LAYOUTS[layout]), jax.devices()[:8])
    plain_loop.assert_alike(plain_loop.steps(composed, loss, optimizer, batch), reference)


@pytest.mark.slow
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
@pytest.mark.parametrize(
    ("name", "layout"),
    some(COMPILED, [("closed over", "data 2 x fsdp 4")], [("nnx", "fsdp 8, zero 1"), ("linen", "fsdp 8")]),
)
def test_their_gradients_are_reduced_once_and_not_for_every_token(name, layout):
    """An LSTM of 128 tokens over fsdp 8 sent 466 MiB a step, and Linen's 546; over data too each token was reduced."""
    model = linen(vocab=512, dim=256) if name == "linen" else partial(MODELS[name], vocab=512, dim=256)
    batch = {key: jax.ShapeDtypeStruct((16, 128), "int32") for key in ("x", "y")}
    composed = jp.compose(model, jp.Parallel(**LAYOUTS[layout]), jp.target_devices("h100:1x8"))
    report = jp.inspect(jp.train_step(composed, loss, optax.adam(1e-2), precision="bf16"), batch)
    parameters = sum(place.leaf.size for place in composed.placements.values())
    batch_axes = {"data", "fsdp"}
    sent = sum(entry.step_wire for entry in report.ledger if batch_axes & {*entry.axes})
    assert sent < 3 * 2 * parameters  # in 16 bits: gathered, and reduced by an all-reduce at most
    assert not [entry for entry in report.ledger if batch_axes & {*entry.axes} and entry.loop]


class Layers(nnx.Module):
    """Equal layers in a scan with a residual stream, constrained as users do."""

    def __init__(self, rngs, recurrent=False):
        self.embed, self.head = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Linear(DIM, VOCAB, rngs=rngs)

        @nnx.vmap(in_axes=0, out_axes=0)
        def make_layer(key):
            rngs = nnx.Rngs(key)
            return nnx.RNN(nnx.GRUCell(DIM, DIM, rngs=rngs)) if recurrent else nnx.Linear(DIM, DIM, rngs=rngs)

        self.layers = make_layer(jax.random.split(rngs.params(), 2))

    def __call__(self, tokens):
        x = jp.constrain(self.embed(tokens), "batch", "seq", "embed")

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def layer(x, layer):
            return x + layer(jp.constrain(jnp.tanh(x), "batch", "seq", "embed"))

        return self.head(layer(x, self.layers))


def lowered(model, **sizes):
    composed = jp.compose(model, jp.Parallel(**sizes), jax.devices()[:8])
    step = jp.train_step(composed, loss, optax.sgd(0.1))
    batch = {key: np.zeros((8, 16), np.int32) for key in ("x", "y")}
    return step.lower(jp.init_state(composed, optax.sgd(0.1)), batch).as_text()


@pytest.mark.parametrize("sizes", [{"fsdp": 8}, {"data": 2, "fsdp": 4, "zero": 1}], ids=str)
def test_a_stream_that_layers_add_to_is_no_sum_of_gradients(sizes, monkeypatch):
    """Its constraint splits examples over fsdp: without it each device would have the stream's gradient of all."""
    found = lowered(Layers, **sizes)
    monkeypatch.setattr(unpipelined, "keep_accumulated_whole", lambda function, *_: function)
    assert found == lowered(Layers, **sizes)


@pytest.mark.slow
def test_layers_of_recurrent_cells_train_as_on_one_device():
    model, generator = partial(Layers, recurrent=True), np.random.default_rng(0)
    batch = {key: generator.integers(0, VOCAB, (8, 8)).astype(np.int32) for key in ("x", "y")}
    reference = plain_loop.train(model, model, loss, optax.sgd(0.3), batch)
    composed = jp.compose(model, jp.Parallel(fsdp=8), jax.devices()[:8])
    plain_loop.assert_alike(plain_loop.steps(composed, loss, optax.sgd(0.3), batch), reference)


@pytest.mark.parametrize(
    "body",
    [lambda c, w: ((jnp.tanh(c[0] @ w), 0.0), c[1]), lambda c, w: (jax.tree.map(jnp.ones_like, c), None)],
    ids=["a constant carry", "a carry of ones"],
)
def test_a_loop_whose_carry_is_a_constant_is_left_alone(body):
    def function(x, ws):
        return jax.grad(lambda ws: jnp.sum(jax.lax.scan(body, (x, 1.0), ws)[0][0]))(ws)

    x, ws = jnp.ones((4, 4)), jnp.ones((2, 4, 4))
    np.testing.assert_array_equal(keep_accumulated_whole(function, ["fsdp"], 1)(x, ws), function(x, ws))
