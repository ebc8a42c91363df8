"""Faults of XLA's: each fails here until a release of XLA mends it, and then says so; beside it, what jaxpar does."""

import jax
import optax
import pytest
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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*times its share")
@pytest.mark.xfail(strict=True, reason="XLA splits the sum over input channels, and adds up 8 copies of it")
def test_a_convolution_of_what_is_not_split_equals_one_device():
    assert first_loss(unkeyed, 8, data=2, fsdp=2, tensor=2) == pytest.approx(first_loss(unkeyed, 1), rel=1e-5)


@pytest.mark.slow
def test_a_convolution_of_what_a_loss_draws_with_its_key_equals_one_device():
    assert first_loss(drawn, 8, data=2, fsdp=2, tensor=2) == pytest.approx(first_loss(drawn, 1), rel=1e-5)
