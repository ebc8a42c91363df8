"""Models after Flax's own examples, unedited: every layout trains them as one device does."""

from functools import cache

import jax
import numpy as np
import optax
import published
import published_variables as variables
import pytest

import jaxpar as jp

jp.simulate(8)
# SpectralNorm multiplies parameters alone; between a lookup and a tied head there is no matmul to be cut with another
pytestmark = pytest.mark.filterwarnings("ignore:(Normed|Tied).* times its share")

NAMES = "mnist", "gemma", "vae", "seq2seq", "resnet", "normed", "tied", "lm1b", "bridged", "back"
QUICK = "gemma", "resnet", "normed", "tied"
MIXED = {"data": 2, "fsdp": 2, "tensor": 2}
SHARDED = [{"fsdp": 8, "zero": stage} for stage in (1, 2, 3)]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def example(name):
    """Returns the model, its loss, and an optimizer like the one its example uses."""
    match name:
        case "mnist":
            # not Adam: norm2 cancels the bias of conv2, and Adam would scale up that zero gradient's rounding
            return published.MnistCNN, published.mnist_loss, optax.sgd(0.1, 0.9)
        case "gemma":
            return published.Gemma, published.language_loss, optax.adamw(5e-3)
        case "vae":
            model = jp.linen(published.VAE(), np.zeros([1, 64], np.float32), jax.random.key(0))
            return model, published.vae_loss, optax.adam(1e-2)
        case "seq2seq":
            tokens = np.zeros([1, 6], np.int32)
            model = jp.linen(published.Seq2seq(), tokens, tokens, tokens[:, 0])
            return model, published.translation_loss, optax.adam(3e-3)
        case "resnet":
            model = jp.linen(published.ResNet(), np.zeros([1, 8, 8, 1], np.float32))
            return model, published.image_loss, optax.sgd(0.1, 0.9, nesterov=True)
        case "normed":
            model = jp.linen(variables.Normed(), np.zeros([1, 8, 8, 1], np.float32))
            return model, published.image_loss, optax.sgd(0.1, 0.9)
        case "tied":
            return jp.linen(variables.Tied(), np.zeros([1, 8], np.int32)), published.language_loss, optax.adam(5e-3)
        case "lm1b":
            return jp.linen(variables.Lm1b(), np.zeros([1, 8], np.int32)), published.language_loss, optax.adam(5e-3)
        case "bridged":
            model = jp.linen(variables.Bridged(), np.zeros([1, 8, 8, 1], np.float32))
            return model, published.digit_loss, optax.sgd(0.1, 0.9)
        case "back":
            return variables.Back, published.digit_loss, optax.sgd(0.1, 0.9)


def make_batch(size=16):
    """Returns noise of every kind that the models read."""
    rng = np.random.default_rng(0)
    image = rng.random([size, 8, 8, 1], np.float32)
    ints = {
        "label": rng.integers(0, 10, size),
        "tokens": rng.integers(0, 32, [size, 9]),
        "source": rng.integers(1, 16, [size, 6]),
        "length": rng.integers(1, 7, size),
        "target": rng.integers(1, 16, [size, 7]) * (np.arange(7) < rng.integers(3, 8, [size, 1])),
    }
    return {"image": image, **{name: value.astype(np.int32) for name, value in ints.items()}}


def train(name, sizes, devices=None, **numerics):
    """Returns the losses of three steps on one batch, and the state after them."""
    model, loss, optimizer = example(name)
    layout = jp.compose(model, jp.Parallel(**sizes), devices)
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, loss, optimizer, **numerics)
    losses = []
    for _ in range(3):
        state, metrics = step(state, make_batch())
        losses.append(float(metrics["loss"]))
    return losses, state


@cache
def on_one_device(name):
    return train(name, {}, jax.devices()[:1])


def assert_same(found, reference):
    """Compares parameters, statistics or random keys, path by path."""

    def compare(path, ours, theirs):
        if jax.dtypes.issubdtype(ours.dtype, jax.dtypes.prng_key):
            ours, theirs = jax.random.key_data(ours), jax.random.key_data(theirs)
        np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), **CLOSE, err_msg=str(path))

    jax.tree.map_with_path(compare, found, reference)


# a model stays in one worker of pytest-xdist, which trains it on one device once
@pytest.mark.parametrize("sizes", [*(pytest.param(s, marks=pytest.mark.slow) for s in SHARDED), MIXED], ids=str)
@pytest.mark.parametrize(
    "name",
    [pytest.param(n, marks=[pytest.mark.xdist_group(n)] + [pytest.mark.slow] * (n not in QUICK)) for n in NAMES],
)
def test_a_published_model_trains_as_on_one_device(name, sizes):
    losses, state = train(name, sizes)
    expected, reference = on_one_device(name)
    np.testing.assert_allclose(losses, expected, **CLOSE)
    assert_same((state.params, state.model_state), (reference.params, reference.model_state))
    assert losses[-1] < losses[0]
    held = state.params if sizes.get("zero", 3) == 3 else state.optimizer
    assert any(x.addressable_shards[0].data.size < x.size for x in jax.tree.leaves(held))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "numerics"),
    [
        pytest.param("mnist", {"remat": "full"}, marks=pytest.mark.xdist_group("mnist")),
        pytest.param("seq2seq", {"accumulate": 2}, marks=pytest.mark.xdist_group("seq2seq")),
    ],
)
def test_remat_and_accumulation_change_nothing_in_a_published_model(name, numerics):
    losses, state = train(name, MIXED, **numerics)
    expected, reference = on_one_device(name)
    np.testing.assert_allclose(losses, expected, **CLOSE)
    assert_same(state.params, reference.params)
