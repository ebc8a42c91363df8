"""Losses that read of the layers of a pipeline more than x: refused, and the way out equals one device."""

import re
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from pairwise import some
from tiny import assert_same_arrays, scanned

import jaxpar as jp

pytestmark = pytest.mark.filterwarnings("ignore:Using 'Module.sow:DeprecationWarning")
DIM, LAYERS = 8, 4
BATCH = {"x": np.random.default_rng(0).normal(size=[8, DIM]).astype(np.float32)}
TWO = jp.Parallel(pipe=2)


class Layer(nnx.Module):
    def __init__(self, rngs):
        self.u = nnx.Linear(DIM, DIM, rngs=rngs)

    def __call__(self, x):
        y = self.u(x)
        self.sow(nnx.Intermediate, "aux", jnp.mean(y**2))
        return x + jnp.tanh(y)

    def adding(self, given):
        """Takes and returns x with sums of what the layers make, and of their parameters' squares."""
        x, aux, penalty = given
        y = self.u(x)
        return x + jnp.tanh(y), aux + jnp.mean(y**2), penalty + jnp.sum(self.u.kernel[...] ** 2)


class Listed(nnx.Module):
    def __init__(self, rngs):
        self.emb, self.out = nnx.Linear(DIM, DIM, rngs=rngs), nnx.Linear(DIM, DIM, rngs=rngs)
        self.h = nnx.List([Layer(rngs) for _ in range(LAYERS)])

    def layers(self):
        return self.h

    def __call__(self, x):
        return self.out(jp.pipelined(self.layers(), self.emb(x)))

    def with_sums(self, x):
        zero = jnp.zeros(())
        x, *sums = jp.pipelined([layer.adding for layer in self.h], (self.emb(x), zero, zero))
        return self.out(x), *sums


class Stacked(Listed):
    def __init__(self, rngs):
        super().__init__(rngs)
        self.h = nnx.vmap(lambda rngs: Layer(rngs))(rngs.fork(split=LAYERS))

    def layers(self):
        return lambda x: scanned(lambda x, layer: x + jnp.tanh(layer.u(x)), x, self.h)

    def with_sums(self, x):
        zero = jnp.zeros(())
        layers = lambda given: scanned(lambda given, layer: layer.adding(given), given, self.h)  # noqa: E731
        x, *sums = jp.pipelined(layers, (self.emb(x), zero, zero))
        return self.out(x), *sums


def data(model, batch):
    error = (model(batch["x"]) - 1) ** 2
    return jnp.sum(error), error.size


def plus(term, model, batch):
    total, count = data(model, batch)
    return total + count * term(model), count


def squares(params):
    return sum(jnp.sum(leaf**2) for leaf in jax.tree.leaves(params))


def norm(params):
    return jnp.sqrt(squares(params))


class Hidden(Listed):
    def __call__(self, x):
        hidden = []

        def run(layer, x):
            hidden.append(layer(x))
            return hidden[-1]

        x = jp.pipelined([partial(run, layer) for layer in self.h], self.emb(x))
        return self.out(x) + sum(hidden)


class LastHidden(Listed):
    """Reads what the last layer returned, which is x, by another way than x."""

    def __call__(self, x):
        hidden = []

        def last(x):
            hidden.append(self.h[-1](x))
            return hidden[-1]

        x = jp.pipelined([*self.h[:-1], last], self.emb(x))
        return self.out(x) + (hidden[0] if hidden else 0)


class ScanOutputs(Stacked):
    def __call__(self, x):
        made = []

        def layers(x):
            weights = self.h.u.kernel[...], self.h.u.bias[...]
            x, ys = jax.lax.scan(lambda x, w: (jnp.tanh(x @ w[0] + w[1]), jnp.mean(x)), x, weights)
            made.append(ys)
            return x

        return self.out(jp.pipelined(layers, self.emb(x))) + sum(ys.mean() for ys in made)


class ScaledEmbedding(Listed):
    def __call__(self, x):
        return self.out(jp.pipelined(self.h, self.emb(x) / norm(nnx.state(self, nnx.Param))))


class SharedInLayers(Listed):
    def layers(self):
        return [lambda x, layer=layer: layer(x) / norm(nnx.state(self.emb, nnx.Param)) for layer in self.h]


class WholeStackInLayers(Stacked):
    def layers(self):
        run = super().layers()
        return lambda x: run(x) / norm(nnx.state(self.h, nnx.Param))


def all_squares(model):
    return squares(nnx.state(model, nnx.Param))


def popped(model):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(nnx.pop(model, nnx.Intermediate)))


def input_gradient(model, batch):
    return jnp.sum(jax.grad(lambda x: jnp.sum(model(x)))(jnp.asarray(batch["x"])) ** 2), 1


def measured(model, batch):
    return {"loss": data(model, batch), "norm": (norm(nnx.state(model, nnx.Param)), 1)}


class LinenLayer(nn.Module):
    @nn.compact
    def __call__(self, x):
        y = nn.Dense(DIM)(x)
        self.sow("intermediates", "aux", jnp.mean(y**2))
        return x + jnp.tanh(y)


class LinenListed(nn.Module):
    @nn.compact
    def __call__(self, x):
        return jp.pipelined([LinenLayer() for _ in range(LAYERS)], nn.Dense(DIM)(x))


class LinenScanned(nn.Module):
    @nn.compact
    def __call__(self, x):
        axes = {"params": 0, "intermediates": 0}
        scan = nn.scan(lambda layer, x: (layer(x), None), axes, split_rngs={"params": True}, length=LAYERS)
        layer = LinenLayer(name="h")
        return jp.pipelined(lambda x: scan(layer, x)[0], nn.Dense(DIM)(x))


def linen(module):
    return jp.from_linen(module, BATCH["x"][:1])


def sown(model):
    return sum(jnp.sum(leaf) for leaf in jax.tree.leaves(model.sown["intermediates"]))


MADE, READ = "that its layers make beside x, in", "outside of its layers"
REFUSED = {
    "sown in a list": (Listed, partial(plus, popped), f"float32[] {MADE} Layer.__call__"),
    "an attribute of a layer": (Listed, partial(plus, lambda model: model.h[1].aux[0]), MADE),
    "a list of hidden states": (Hidden, data, f"float32[2, {DIM}] {MADE}"),
    "the last hidden state": (LastHidden, data, MADE),
    "what a scan stacks": (ScanOutputs, data, f"float32[{LAYERS}] {MADE}"),
    "sown in a list of Linen": (linen(LinenListed()), partial(plus, sown), f"float32[] {MADE} LinenLayer.__call__"),
    "sown in nn.scan": (linen(LinenScanned()), partial(plus, sown), f"float32[{LAYERS}] {MADE}"),
    "a gradient by the input": (linen(LinenListed()), input_gradient, "beside x"),
    "squares of a list": (Listed, partial(plus, all_squares), READ),
    "squares of a stack": (Stacked, partial(plus, all_squares), f"h/u/bias {READ}"),
    "squares of a list of Linen": (linen(LinenListed()), partial(plus, lambda model: squares(model.params)), READ),
    "squares in nn.scan": (linen(LinenScanned()), partial(plus, lambda model: squares(model.params)), READ),
    "a norm that is measured": (Stacked, measured, READ),
    "a norm in the embedding": (ScaledEmbedding, data, READ),
    "parameters of the embedding in layers": (SharedInLayers, data, "reads emb/bias inside of its layers"),
    "all of a stack in each stage": (WholeStackInLayers, data, "h/u/bias of all layers at once, in `reduce_sum`"),
}  # fmt: skip


def lowered(model, loss, parallel=TWO):
    step = jp.train_step(jp.compose(model, parallel, jax.devices()[: parallel.pipe]), loss, optax.sgd(0.1))
    step.lower(step.abstract(), BATCH)


@pytest.mark.parametrize(
    "case",
    some(
        REFUSED,
        [
            "a list of hidden states",
            "sown in nn.scan",
            "a gradient by the input",
            "squares of a list of Linen",
            "squares in nn.scan",
        ],
    ),
)
def test_a_loss_that_reads_more_of_the_layers_than_x_is_refused(case):
    model, loss, words = REFUSED[case]
    with pytest.raises(jp.JaxparError, match=re.escape(words)):
        lowered(model, loss)


@pytest.mark.parametrize("case", ["sown in a list", "squares of a stack"])
def test_so_is_one_in_an_evaluation(case):
    model, loss, words = REFUSED[case]
    layout = jp.compose(model, TWO, jax.devices()[:2])
    step = jp.train_step(layout, loss, optax.sgd(0.1))
    with pytest.raises(jp.JaxparError, match=re.escape(words)):
        step.evaluate(jp.init_state(layout, optax.sgd(0.1)), BATCH)


@pytest.mark.parametrize("case", ["what a scan stacks", "squares of a stack"])
def test_so_is_one_whose_weights_change_in_the_middle_of_a_step(case):
    model, loss, words = REFUSED[case]
    with pytest.raises(jp.JaxparError, match=re.escape(words)):
        lowered(model, loss, jp.Parallel(pipe=2, pipeline=jp.Pipeline(weights="stash")))


@pytest.mark.nightly
def test_what_layers_sow_and_no_loss_reads_is_not_refused():
    lowered(Listed, data)
    lowered(linen(LinenScanned()), data)


def test_squares_of_the_other_parameters_are_not_refused():
    lowered(Listed, partial(plus, lambda model: squares((nnx.state(model.emb), nnx.state(model.out)))))


def riding(model, batch):
    out, aux, penalty = model.with_sums(batch["x"])
    error = (out - 1) ** 2
    return jnp.sum(error) + error.size * (aux + 0.1 * penalty + 0.1 * squares(nnx.state(model.emb))), error.size


@pytest.mark.nightly
@pytest.mark.parametrize("model", [pytest.param(Listed, marks=pytest.mark.slow), Stacked])
def test_sums_that_ride_along_in_x_equal_one_device(model):
    def trained(parallel, count):
        layout = jp.compose(model, parallel, jax.devices()[:count])
        state, step = jp.init_state(layout, optax.sgd(0.1)), jp.train_step(layout, riding, optax.sgd(0.1))
        losses = []
        for _ in range(3):
            state, metrics = step(state, BATCH)
            losses.append(float(metrics["loss"]))
        return np.array(losses), state.params

    assert_same_arrays(trained(jp.Parallel(pipe=2, data=2), 4), trained(jp.Parallel(), 1))
