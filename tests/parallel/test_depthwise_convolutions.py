"""A depthwise convolution of images that `tensor` or `context` leaves whole has the gradient of one device."""

import jax.numpy as jnp
import numpy as np
import optax
import plain_loop
import pytest
from flax import nnx

import jaxpar as jp

SGD = optax.sgd(0.1)
RNG = np.random.default_rng(0)
BATCH = {"x": RNG.normal(size=[8, 6, 6, 8]).astype(np.float32), "y": RNG.normal(size=[8, 16]).astype(np.float32)}


class Depthwise(nnx.Module):
    """Convolves each channel of its input by itself, which no layer before has split."""

    def __init__(self, rngs, *, outputs=1):
        self.each = nnx.Conv(8, 8 * outputs, (3, 3), feature_group_count=8, rngs=rngs)
        self.head = nnx.Linear(8 * outputs, 16, rngs=rngs)

    def __call__(self, x):
        return self.head(jnp.mean(nnx.gelu(self.each(x)), axis=(1, 2)))


def squares(model, batch):
    losses = (model(batch["x"]) - batch["y"]) ** 2
    return losses.sum(), losses.size


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "sizes",
    [
        {"data": 2, "tensor": 4},
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2}, marks=pytest.mark.slow),
        pytest.param({"data": 2, "fsdp": 2, "tensor": 2, "zero": 1}, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_the_gradient_of_a_depthwise_kernel_counts_each_example_once(sizes):
    result = plain_loop.steps(jp.compose(Depthwise, jp.Parallel(**sizes)), squares, SGD, BATCH)
    plain_loop.assert_alike(result, plain_loop.train(Depthwise, Depthwise, squares, SGD, BATCH))
