"""Convolutions where replicas step apart: mapped over replicas, each becomes one of as many groups of channels."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp

OPTIMIZER = optax.sgd(0.1)


class Net(nnx.Module):
    def __init__(self, groups, rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 8, (3, 3), strides=2, feature_group_count=groups, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 4, (2, 2), strides=2, rngs=rngs)

    def __call__(self, images):
        return self.up(nnx.relu(self.second(nnx.relu(self.first(images)))))


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"])
    return losses.sum(), losses.size


def losses_of(groups, rows, exchange=None, **sizes):
    numbers = np.random.default_rng(0)
    batch = {
        "images": numbers.normal(size=(rows, 16, 16, 3)).astype(np.float32),
        "labels": numbers.integers(0, 4, (rows, 16, 16)).astype(np.int32),
    }
    layout = jp.compose(lambda rngs: Net(groups, rngs), jp.Parallel(**sizes, exchange=exchange))
    step, losses = jp.train_step(layout, loss, OPTIMIZER), []
    state = jp.init_state(layout, OPTIMIZER, seed=0)
    for _ in range(3):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("rows", [8, 16])  # with one example of a replica XLA's own split was 2e-3 off
@pytest.mark.parametrize("groups", [1, 2])
def test_means_of_parameters_after_every_step_are_means_of_gradients(groups, rows):
    apart = losses_of(groups, rows, jp.Exchange("local", every=1), data=8)
    np.testing.assert_allclose(apart, losses_of(groups, rows, data=8), rtol=1e-5)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")  # groups of several channels, which XLA runs whole
@pytest.mark.parametrize("groups", [1, 2])
def test_a_replica_of_several_devices_steps_as_one_of_one_device(groups):
    apart = jp.Exchange("local", every=2)
    several = losses_of(groups, 8, apart, data=2, fsdp=4)
    layout = jp.compose(lambda rngs: Net(groups, rngs), jp.Parallel(data=2, exchange=apart), jax.devices()[:2])
    assert layout.devices == 2
    step, state, expected = jp.train_step(layout, loss, OPTIMIZER), jp.init_state(layout, OPTIMIZER, seed=0), []
    numbers = np.random.default_rng(0)
    batch = {
        "images": jnp.asarray(numbers.normal(size=(8, 16, 16, 3)).astype(np.float32)),
        "labels": jnp.asarray(numbers.integers(0, 4, (8, 16, 16)).astype(np.int32)),
    }
    for _ in range(3):
        state, metrics = step(state, batch)
        expected.append(float(metrics["loss"]))
    np.testing.assert_allclose(several, expected, rtol=1e-5)
