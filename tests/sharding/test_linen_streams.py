"""A Linen model draws from random streams that its example call, a deterministic one, does not show."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from pairwise import some
from tiny import assert_same_arrays

import jaxpar as jp
from jaxpar.errors import JaxparError
from jaxpar.parallel.compose import as_blueprint

DIM = 8
LAYOUTS = {
    "data 8": ({"data": 8}, {}),
    "zero 3": ({"fsdp": 8}, {"remat": "full"}),
    "2x2x2": ({"data": 2, "fsdp": 2, "tensor": 2}, {}),
}


class DropPath(nn.Module):
    """Stochastic depth as models of transformers write it."""

    @nn.compact
    def __call__(self, x, deterministic=True):
        if deterministic:
            return x
        return x * jax.random.bernoulli(self.make_rng("droppath"), 0.5, (len(x), 1)) * 2


class Paths(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        x = nn.Dropout(0.5)(nn.Dense(DIM)(x), deterministic=deterministic)
        return x + DropPath()(nn.Dense(DIM)(x), deterministic)


class Trained(nn.Module):
    """A codebook that draws in training, by another keyword."""

    @nn.compact
    def __call__(self, x, train=False):
        logits = nn.Dense(DIM)(x)
        if train:
            logits += jax.random.gumbel(self.make_rng("gumbel"), logits.shape)
        return DropPath()(nn.softmax(logits), not train)


class Layer(nn.Module):
    deterministic: bool = True

    @nn.compact
    def __call__(self, x, _):
        return x + DropPath()(nn.Dense(DIM)(x), self.deterministic), None


class Scanned(nn.Module):
    """Layers in a scan that splits the stream of its layers."""

    @nn.compact
    def __call__(self, x, deterministic=True):
        split = {"params": True, "droppath": True}
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs=split, length=2)
        return layers(deterministic)(x, None)[0]


def loss_of(**of_training):
    def loss(model, batch):
        keywords = of_training if model.training else {}
        losses = (model(batch["x"], **keywords) - batch["y"]) ** 2
        return jnp.sum(losses), losses.size

    return loss


MODELS = {
    "paths": (Paths, loss_of(deterministic=False)),
    "gumbel": (Trained, loss_of(train=True)),
    "in a scan": (Scanned, loss_of(deterministic=False)),
}


def trained(name, sizes, numerics, devices=None):
    make, loss = MODELS[name]
    layout, optimizer = (
        jp.compose(jp.from_linen(make(), jnp.zeros([1, DIM])), jp.Parallel(**sizes), devices),
        optax.sgd(0.1),
    )
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, loss, optimizer, **numerics)
    x, y = np.random.default_rng(0).normal(size=(2, 16, DIM)).astype(np.float32)
    losses = []
    for _ in range(3):
        state, metrics = step(state, {"x": x, "y": y})
        losses.append(float(metrics["loss"]))
    total, count = step.evaluate(state, {"x": x, "y": y})["loss"]
    return losses, float(total) / float(count), state.params


@pytest.mark.nightly
@pytest.mark.parametrize("name", some(MODELS, ["gumbel"], ["in a scan"]))
def test_streams_of_training_alone_are_drawn_from_on_every_layout_alike(name):
    losses, evaluated, params = trained(name, {}, {}, jax.devices()[:1])
    assert len(set(losses)) == 3
    for sizes, numerics in LAYOUTS.values() if name == "paths" else [LAYOUTS["2x2x2"]]:
        found, score, own = trained(name, sizes, numerics)
        np.testing.assert_allclose([*found, score], [*losses, evaluated], rtol=1e-5)
        assert_same_arrays(own, params)


def test_streams_that_the_example_call_draws_from_are_known_before():
    blueprint = as_blueprint(jp.from_linen(Paths(), jnp.zeros([1, DIM]), deterministic=False))
    assert blueprint.bind.keywords["streams"].names == ("dropout", "droppath")
    blueprint = as_blueprint(jp.from_linen(Paths(), jnp.zeros([1, DIM])))
    assert blueprint.bind.keywords["streams"].names == ("dropout",)


class Piped(nn.Module):
    """Layers that a pipeline cuts."""

    @nn.compact
    def __call__(self, x, deterministic=True):
        split = {"params": True, "droppath": True}
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs=split, length=2)(deterministic)
        return nn.Dense(DIM)(jp.pipelined(lambda x: layers(x, None)[0], nn.Dense(DIM)(x)))


@pytest.mark.nightly
def test_a_pipeline_names_the_example_call_that_shows_them():
    parallel = jp.Parallel(pipe=2, data=4, pipeline=jp.Pipeline(microbatches=2))
    layout, optimizer = jp.compose(jp.from_linen(Piped(), jnp.zeros([1, DIM])), parallel), optax.sgd(0.1)
    step = jp.train_step(layout, loss_of(deterministic=False), optimizer)
    batch = {"x": np.ones((16, DIM), np.float32), "y": np.ones((16, DIM), np.float32)}
    with pytest.raises(JaxparError) as error:
        step(jp.init_state(layout, optimizer), batch)
    assert "'droppath' in training, and not in its example call" in str(error.value)
    assert "jp.from_linen(Piped(...), inputs, deterministic=False)" in str(error.value)
    layout = jp.compose(jp.from_linen(Piped(), jnp.zeros([1, DIM]), deterministic=False), parallel)
    step = jp.train_step(layout, loss_of(deterministic=False), optimizer)
    assert np.isfinite(float(step(jp.init_state(layout, optimizer), batch)[1]["loss"]))


class Hidden(nn.Module):
    """A scan that does not hand its layers the stream that they draw from."""

    @nn.compact
    def __call__(self, x, deterministic=True):
        layers = nn.scan(Layer, variable_axes={"params": 0}, split_rngs={"params": True}, length=2)
        return layers(deterministic)(x, None)[0]


def test_a_stream_that_a_scan_hides_is_an_error_and_no_loop():
    layout, optimizer = jp.compose(jp.from_linen(Hidden(), jnp.zeros([1, DIM])), jp.Parallel(data=8)), optax.sgd(0.1)
    step = jp.train_step(layout, loss_of(deterministic=False), optimizer)
    with pytest.raises(JaxparError, match="droppath"):
        step(jp.init_state(layout, optimizer), {"x": np.ones((16, DIM)), "y": np.ones((16, DIM))})
