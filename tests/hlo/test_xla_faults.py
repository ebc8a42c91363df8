"""Faults of XLA's: each fails here until a release of XLA mends it, and then says so; beside it, what jaxpar does."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import AxisType, NamedSharding
from jax.sharding import PartitionSpec as P
from published import EXAMPLES

import jaxpar as jp

gan = EXAMPLES["gan"]


def drawn(model, batch, key):
    """Returns what the discriminator says of images made of noise that nothing splits over the examples."""
    fake = model.generator(jax.random.normal(key, (16, model.latents)))
    return model.discriminator(fake).sum(), 16


def unkeyed(model, batch):
    return drawn(model, batch, jax.random.key(3))


def first_loss(loss, devices, **sizes):
    layout = jp.compose(gan.model, jp.Parallel(**sizes), jax.devices()[:devices])
    state = jp.init_state(layout, optax.sgd(0.1))
    _, metrics = jp.train_step(layout, loss, optax.sgd(0.1))(state, gan.numbers())
    return float(metrics["loss"])


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*times its share")
@pytest.mark.xfail(strict=True, reason="XLA splits the sum over input channels, and adds up 8 copies of it")
def test_a_convolution_of_what_is_not_split_equals_one_device():
    assert first_loss(unkeyed, 8, data=2, fsdp=2, tensor=2) == pytest.approx(first_loss(unkeyed, 1), rel=1e-5)


@pytest.mark.nightly
def test_a_convolution_of_what_a_loss_draws_with_its_key_equals_one_device():
    assert first_loss(drawn, 8, data=2, fsdp=2, tensor=2) == pytest.approx(first_loss(drawn, 1), rel=1e-5)


def excess(function, spec, *arrays):
    """Returns the largest difference of a gradient to that of one device, on a mesh of 2 x 2 x 2."""
    mesh = jax.make_mesh((2, 2, 2), ("data", "height", "tensor"), axis_types=(AxisType.Auto,) * 3)

    def split(images, kernel):
        constrain = lambda x: jax.lax.with_sharding_constraint(x, NamedSharding(mesh, spec))  # noqa: E731
        return jnp.sum(jnp.sin(constrain(function(constrain(images), kernel))))

    def whole(images, kernel):
        return jnp.sum(jnp.sin(function(images, kernel)))

    placed = [jax.device_put(array, NamedSharding(mesh, P())) for array in arrays]
    found = jax.jit(jax.grad(split, argnums=(0, 1)))(*placed)
    expected = jax.grad(whole, argnums=(0, 1))(*arrays)
    return max(float(jnp.max(jnp.abs(a - b))) for a, b in zip(map(jax.device_get, found), expected, strict=True))


def convolve(images, kernel):
    return jax.lax.conv_general_dilated(images, kernel, (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC"))


def depthwise(images, kernel):
    numbers = ("NHWC", "HWIO", "NHWC")
    return jax.lax.conv_general_dilated(
        images, kernel[:, :, :1], (1, 1), "SAME", dimension_numbers=numbers, feature_group_count=8
    )


def pool(images, kernel):
    return nnx.max_pool(images * kernel.mean(), (3, 3), strides=(1, 1), padding="SAME")


ARRAYS = tuple(
    np.random.default_rng(0).normal(size=shape).astype(np.float32) for shape in ((4, 16, 16, 8), (3, 3, 8, 8))
)


@pytest.mark.xfail(strict=True, reason="XLA's split of rows between axes that do not split: parallel/convolutions.py")
def test_xla_splits_the_rows_of_a_convolution():
    assert excess(convolve, P(None, "height"), *ARRAYS) < 1e-4


@pytest.mark.xfail(strict=True, reason="XLA's split of overlapping windows of stride 1: parallel/split_windows.py")
def test_xla_splits_the_gradient_of_a_maximum():
    assert excess(pool, P(None, "height"), *ARRAYS) < 1e-4


@pytest.mark.xfail(strict=True, reason="XLA's sum over axes on which the images are whole: parallel/split_windows.py")
def test_xla_splits_the_gradient_of_a_depthwise_kernel():
    assert excess(depthwise, P("data"), *ARRAYS) < 1e-3
