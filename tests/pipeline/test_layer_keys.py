"""Dropout before, inside and after a list of Linen layers: a pipeline draws what one device does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from tiny import assert_same_arrays

import jaxpar as jp

DIM = 8
BATCH = {"x": np.random.default_rng(0).normal(size=[8, DIM]).astype(np.float32)}


class Layer(nn.Module):
    rate: float
    noise: bool = False

    @nn.compact
    def __call__(self, x):
        y = nn.Dropout(self.rate, deterministic=False)(jnp.tanh(nn.Dense(DIM)(x)))
        if self.noise:
            y += 0.1 * jax.random.normal(self.make_rng("noise"), y.shape)
        return x + y


class Net(nn.Module):
    before: float = 0.0
    inside: float = 0.0
    after: float = 0.0
    noise: bool = False

    @nn.compact
    def __call__(self, x):
        x = nn.Dropout(self.before, deterministic=False)(nn.Dense(DIM, name="emb")(x))
        if self.noise:
            x += 0.1 * jax.random.normal(self.make_rng("noise"), x.shape)
        x = jp.pipelined([Layer(self.inside, self.noise) for _ in range(2)], x)
        return nn.Dense(DIM, name="out")(nn.Dropout(self.after, deterministic=False)(x))


class Masked(nn.Module):
    """Layers read a random mask that is drawn before them."""

    @nn.compact
    def __call__(self, x):
        keep = jax.random.bernoulli(self.make_rng("dropout"), 0.5, x.shape[-1:])
        layers = [Layer(0.1) for _ in range(2)]
        return jp.pipelined([lambda x, layer=layer: layer(x) * keep for layer in layers], nn.Dense(DIM)(x))


def loss(model, batch):
    error = (model(batch["x"]) - 1) ** 2
    return jnp.sum(error), error.size


def trained(module, parallel, devices, **settings):
    layout = jp.compose(jp.from_linen(module, BATCH["x"][:1]), parallel, jax.devices()[:devices])
    state, step = jp.init_state(layout, optax.sgd(0.1)), jp.train_step(layout, loss, optax.sgd(0.1), **settings)
    losses = []
    for _ in range(2):
        state, metrics = step(state, BATCH)
        losses.append(float(metrics["loss"]))
    return np.array(losses), state.params


@pytest.mark.nightly
@pytest.mark.parametrize(
    "module",
    [
        Net(before=0.2, inside=0.2),
        pytest.param(Net(before=0.2), marks=pytest.mark.full),
        pytest.param(Net(inside=0.2, after=0.2), marks=pytest.mark.full),
        pytest.param(Net(before=0.2, inside=0.2, noise=True), marks=pytest.mark.slow),
        pytest.param(Masked(), marks=pytest.mark.full),
    ],
    ids=["before, inside", "before", "inside, after", "two streams", "a mask for all layers"],
)
def test_a_pipeline_draws_what_one_device_does(module):
    pipeline = jp.Pipeline(microbatches=2)
    assert_same_arrays(
        trained(module, jp.Parallel(pipe=2, pipeline=pipeline), 2), trained(module, jp.Parallel(), 1, accumulate=2)
    )


@pytest.mark.slow
def test_dropout_before_the_layers_trains_with_replicas():
    losses, _ = trained(Net(before=0.1, inside=0.1), jp.Parallel(pipe=2, data=2), 4)
    assert losses[1] < losses[0]
