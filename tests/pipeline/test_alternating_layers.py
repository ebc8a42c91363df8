"""Layers of several kinds in turns, such as local and global attention: a callable runs one turn of them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp

DIM = 8
BATCH = {"x": np.random.default_rng(0).normal(size=[8, DIM]).astype(np.float32)}


class Layer(nnx.Module):
    def __init__(self, kind, rngs, rate=0.0):
        self.u, self.kind, self.drop = nnx.Linear(DIM, DIM, rngs=rngs), kind, nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, scale=1.0):
        y = self.drop(self.u(x))
        return x + scale * (jnp.tanh(y), jnp.sin(y), 2 * y)[self.kind]


class Turns(nnx.Module):
    def __init__(self, rngs, kinds=2, layers=8, rate=0.0):
        self.kinds = kinds
        self.h = nnx.List([Layer(i % kinds, rngs, rate) for i in range(layers)])

    def turns(self):
        return zip(*(self.h[i :: self.kinds] for i in range(self.kinds)), strict=True)

    def __call__(self, x):
        def run(x, turn):
            for layer in turn:
                x = layer(x)
            return x

        return jp.pipelined([lambda x, turn=turn: run(x, turn) for turn in self.turns()], x)


class Numbered(Turns):
    """Each turn has a number of its own."""

    def __call__(self, x):
        layers = [lambda x, scale, a=a, b=b: b(a(x, scale), scale) for a, b in self.turns()]
        return jp.pipelined(layers, x, jnp.linspace(0.5, 1, len(layers)))


class Single(Turns):
    def __call__(self, x):
        return jp.pipelined(self.h, x)


class Strided(Turns):
    """Each callable runs layers that are not neighbours."""

    def __call__(self, x):
        pairs = zip(self.h[:4], self.h[4:], strict=True)
        return jp.pipelined([lambda x, a=a, b=b: b(a(x)) for a, b in pairs], x)


class Towers(nnx.Module):
    """Two lists of equal layers: the pipeline is given the smaller one."""

    def __init__(self, rngs, layers=4):
        self.text = nnx.List([Layer(0, rngs) for _ in range(layers)])
        self.vision = nnx.List([nnx.Linear(DIM, 2 * DIM, rngs=rngs) for _ in range(8)])

    def __call__(self, x):
        for layer in self.vision:
            x = layer(x)[:, :DIM]
        return jp.pipelined(self.text, x)


class OtherTower(Towers):
    """Given the larger one."""

    def __call__(self, x):
        for layer in self.text:
            x = layer(x)
        return jp.pipelined([lambda x, layer=layer: layer(x)[:, :DIM] for layer in self.vision], x)


def stack_of_wide_layers(rngs):
    return nnx.vmap(lambda rngs: nnx.Linear(DIM, 2 * DIM, rngs=rngs))(rngs.fork(split=8))


class ListBesideStack(Towers):
    """A list in the pipeline, a larger stack before it."""

    def __init__(self, rngs):
        self.text = nnx.List([Layer(0, rngs) for _ in range(4)])
        self.vision = stack_of_wide_layers(rngs)

    def __call__(self, x):
        return jp.pipelined(self.text, self.seen(x))

    def seen(self, x):
        scan = nnx.scan(lambda x, layer: layer(x)[:, :DIM], in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return scan(x, self.vision)


class TwoStacks(ListBesideStack):
    """A stack in the pipeline, a larger one before it."""

    def __init__(self, rngs):
        self.text = nnx.vmap(lambda rngs: nnx.Linear(DIM, DIM, rngs=rngs))(rngs.fork(split=4))
        self.vision = stack_of_wide_layers(rngs)

    def __call__(self, x):
        scan = nnx.scan(lambda x, layer: nnx.tanh(layer(x)), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        return jp.pipelined(lambda x: scan(x, self.text), self.seen(x))


class Gated(nnx.Module):
    """A layer with other parameters than `Layer`."""

    def __init__(self, rngs):
        self.u, self.gate = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Param(jnp.ones(2 * DIM))

    def __call__(self, x):
        return x + jnp.tanh(self.u(x) * self.gate)[:, :DIM]


class Hybrid(nnx.Module):
    """Two gated layers and one of another kind in turns, twice, and two gated layers after the last turn."""

    def __init__(self, rngs):
        self.h = nnx.List([Layer(0, rngs) if i % 3 == 2 else Gated(rngs) for i in range(14)])

    def __call__(self, x):
        turns = zip(self.h[0:12:3], self.h[1:12:3], self.h[2:12:3], strict=True)
        x = jp.pipelined([lambda x, a=a, b=b, c=c: c(b(a(x))) for a, b, c in turns], x)
        return self.h[13](self.h[12](x))


class SingleHybrid(Hybrid):
    """Each of the layers is given by itself."""

    def __call__(self, x):
        return jp.pipelined(self.h[:12], x)


class Random(nnx.Module):
    """One kind draws random numbers, the other does not."""

    def __init__(self, rngs):
        self.h = nnx.List([Gated(rngs) if i % 2 else Layer(0, rngs, 0.2) for i in range(8)])

    def __call__(self, x):
        pairs = zip(self.h[::2], self.h[1::2], strict=True)
        return jp.pipelined([lambda x, a=a, b=b: b(a(x)) for a, b in pairs], x)


class LinenLayer(nn.Module):
    local: bool
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        y = nn.Dropout(self.rate, deterministic=False)(nn.Dense(DIM)(x))
        return x + (jnp.tanh(y) if self.local else jnp.sin(y))


class LinenTurns(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        h = [LinenLayer(i % 2 == 0, self.rate, name=f"h_{i}") for i in range(4)]
        return jp.pipelined([lambda x, a=a, b=b: b(a(x)) for a, b in zip(h[::2], h[1::2], strict=True)], x)


class LinenTowers(nn.Module):
    @nn.compact
    def __call__(self, x):
        for i in range(8):
            x = nn.Dense(2 * DIM, name=f"vision_{i}")(x)[:, :DIM]
        return jp.pipelined([LinenLayer(True, name=f"text_{i}") for i in range(4)], x)


class LinenHybrid(nn.Module):
    @nn.compact
    def __call__(self, x):
        h = [LinenGated(name=f"h_{i}") if i % 2 else LinenLayer(True, name=f"h_{i}") for i in range(8)]
        return jp.pipelined([lambda x, a=a, b=b: b(a(x)) for a, b in zip(h[::2], h[1::2], strict=True)], x)


class LinenGated(nn.Module):
    @nn.compact
    def __call__(self, x):
        return x * nn.sigmoid(nn.Dense(DIM, name="gate")(x))


def loss(model, batch):
    error = (model(batch["x"]) - 1) ** 2
    return jnp.sum(error), error.size


def trained(model, parallel, devices, **settings):
    layout = jp.compose(model, parallel, jax.devices()[:devices])
    state, step = jp.init_state(layout, optax.sgd(0.1)), jp.train_step(layout, loss, optax.sgd(0.1), **settings)
    losses = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state.params


def linen(module):
    return jp.from_linen(module, BATCH["x"][:1])


def piped(**settings):
    return jp.Pipeline(microbatches=2, **settings)


CASES = {
    "pairs": (Turns, {"data": 2}, {}),
    "numbers of turns": (Numbered, {}, {}),
    "three kinds": (lambda rngs: Turns(rngs, 3, 6), {}, {}),
    "dropout": (lambda rngs: Turns(rngs, 2, 4, 0.2), {}, {}),
    "linen": (linen(LinenTurns()), {"data": 2}, {}),
    "dropout of linen": (linen(LinenTurns(0.2)), {}, {}),
    "interleaved": (Turns, {}, {"schedule": "interleaved_phased"}),
    "gathered per tick": (Turns, {"fsdp": 2, "zero": 3}, {"gather": "tick"}),
    "the smaller of two lists": (Towers, {"data": 2}, {"stack": "text"}),
    "the smaller of two lists of linen": (linen(LinenTowers()), {}, {"stack": "text_"}),
    "a list beside a larger stack": (ListBesideStack, {"fsdp": 2, "zero": 3}, {"stack": "text"}),
    "kinds with other parameters": (Hybrid, {"data": 2}, {}),
    "kinds with other parameters in linen": (linen(LinenHybrid()), {"fsdp": 2, "zero": 3}, {}),
    "kinds of which one has dropout": (Random, {}, {"schedule": "interleaved_phased"}),
    "the smaller of two stacks": (TwoStacks, {"data": 2}, {"stack": "text"}),
}
OFTEN = ["numbers of turns", "the smaller of two lists"]


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("case", some(CASES, ["linen"], OFTEN))
def test_callables_of_several_layers_equal_one_device(case):
    model, sizes, pipeline = CASES[case]
    parallel = jp.Parallel(pipe=2, **sizes, pipeline=piped(**pipeline))
    devices = 2 * sizes.get("data", 1) * sizes.get("fsdp", 1)
    assert_same_arrays(trained(model, parallel, devices), trained(model, jp.Parallel(), 1, accumulate=2))


@pytest.mark.nightly
def test_the_larger_of_two_lists_is_taken_where_it_is_given():
    layout = jp.compose(OtherTower, jp.Parallel(pipe=2), jax.devices()[:2])
    step = jp.train_step(layout, loss, optax.sgd(0.1))
    step.lower(step.abstract(), BATCH)


PAIRS = "jp.pipelined([lambda x, a=a, b=b: b(a(x)) for a, b in zip(layers[0::2], layers[1::2])], x)"


@pytest.mark.parametrize(
    ("model", "parallel", "words"),
    [
        pytest.param(
            Single, {"pipe": 2}, f"2 kinds in turns as one callable for each turn: {PAIRS}", marks=pytest.mark.slow
        ),
        pytest.param(Single, {"pipe": 2}, "= sin ", marks=pytest.mark.slow),
        (lambda rngs: Single(rngs, 3, 6), {"pipe": 2}, "c(b(a(x))) for a, b, c in zip(layers[0::3]"),
        pytest.param(
            lambda rngs: Strided(rngs, 1),
            {"pipe": 2},
            "gives jp.pipelined 4 layers, and its largest list of equal layers is h/0 ... h/7",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Turns,
            {"pipe": 8, "pipeline": jp.Pipeline(microbatches=8)},
            "gives jp.pipelined 4 callables of 2 layers each, for 8 parts",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Turns,
            {"pipe": 2, "pipeline": jp.Pipeline(layers=(6, 2))},
            "2 layers each, for layers=(6, 2)",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Towers,
            {"pipe": 2},
            'fix:  jp.Pipeline(stack="text") for the layers given, which read text/0/u/bias',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda rngs: Towers(rngs, 6),
            {"pipe": 2},
            'jp.Pipeline(stack="text") for the layers given',
            marks=pytest.mark.slow,
        ),
        pytest.param(
            lambda rngs: Towers(rngs, 8), {"pipe": 2}, "which read text/0/u/bias; or pipe=1", marks=pytest.mark.slow
        ),
        pytest.param(
            Towers,
            {"pipe": 2, "pipeline": jp.Pipeline(stack="vision")},
            "its chosen list of equal layers is vision/0",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            SingleHybrid,
            {"pipe": 2},
            "layers of 3 kinds in turns as one callable for each turn: jp.pipelined([lambda x",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_layers_that_are_not_equal_turns_are_refused(model, parallel, words):
    layout = jp.compose(model, jp.Parallel(**parallel), jax.devices()[: parallel["pipe"]])
    step = jp.train_step(layout, loss, optax.sgd(0.1))
    with pytest.raises(jp.JaxparError, match=re.escape(words)):
        step.lower(step.abstract(), BATCH)
