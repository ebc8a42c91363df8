"""A loss that is another one in parts of a batch: it compares rows with each other, or has a constant count."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp

ROWS = 16


class Towers(nnx.Module):
    """Two encoders whose rows belong together, as in CLIP."""

    def __init__(self, rngs, width=16):
        self.images, self.texts = nnx.Linear(12, width, rngs=rngs), nnx.Linear(20, width, rngs=rngs)

    def __call__(self, images, texts):
        return self.images(images), self.texts(texts)


def contrastive(model, batch):
    images, texts = model(batch["images"], batch["texts"])
    scores = images @ texts.T
    losses = optax.softmax_cross_entropy_with_integer_labels(scores, jnp.arange(len(scores)))
    return jnp.sum(losses), losses.size


def squares(model, batch):
    images, texts = model(batch["images"], batch["texts"])
    errors = (images - texts) ** 2  # [16, 16] too, if a row has as many features as the batch has rows
    return jnp.sum(errors), errors.size


def loss_of(loss, accumulate):
    rng = np.random.default_rng(0)
    batch = {"images": rng.normal(size=(ROWS, 12)), "texts": rng.normal(size=(ROWS, 20))}
    layout = jp.compose(Towers, jp.Parallel(data=2), jax.devices()[:2])
    step = jp.train_step(layout, loss, optax.sgd(0.1), accumulate=accumulate)
    _, metrics = step(
        jp.init_state(layout, optax.sgd(0.1), seed=0), {name: rows.astype("float32") for name, rows in batch.items()}
    )
    return float(metrics["loss"])


def test_microbatches_of_a_loss_over_pairs_of_rows_are_warned_of():
    with pytest.warns(UserWarning, match=r"pairs the rows of a batch.*test_parts_of_a_batch.py:\d+.*its 4 rows alone"):
        parts = loss_of(contrastive, 4)
    assert parts < 0.8 * loss_of(contrastive, 1)  # without a warning: they are errors in these tests


def test_microbatches_of_a_loss_over_single_rows_are_not():
    assert loss_of(squares, 4) == pytest.approx(loss_of(squares, 1), rel=1e-5)


def test_a_model_that_takes_the_rows_of_a_microbatch_alone_trains():
    def fixed(model, batch):
        if len(batch["images"]) != ROWS // 4:
            raise ValueError("a memory of four rows")
        return squares(model, batch)

    assert loss_of(fixed, 4) == pytest.approx(loss_of(squares, 1), rel=1e-5)


def test_a_constant_count_is_warned_of_in_parts_of_a_batch():
    def constant(model, batch):
        return squares(model, batch)[0], ROWS * 16

    with pytest.warns(UserWarning, match=r"(?s)counts 256 for 4 rows and for 8.*4 parts.*divided by 1024.*losses.size"):
        parts = loss_of(constant, 4)
    assert parts == pytest.approx(loss_of(constant, 1) / 4, rel=1e-5)  # without a warning


def test_a_constant_count_is_warned_of_where_replicas_compute_losses_of_their_own():
    def constant(model, batch):
        return squares(model, batch)[0], ROWS * 16

    layout = jp.compose(Towers, jp.Parallel(data=2, exchange=jp.Exchange("sign", smallest=1)), jax.devices()[:2])
    step = jp.train_step(layout, constant, optax.sgd(0.1))
    batch = {name: jax.ShapeDtypeStruct((ROWS, size), jnp.float32) for name, size in (("images", 12), ("texts", 20))}
    with pytest.warns(UserWarning, match=r"counts 256 for 8 rows and for 16.*2 parts.*divided by 512"):
        step.lower(step.abstract(), batch)


def test_pairs_of_rows_are_warned_of_where_replicas_compute_losses_of_their_own():
    layout = jp.compose(Towers, jp.Parallel(data=2, exchange=jp.Exchange("sign", smallest=1)), jax.devices()[:2])
    step = jp.train_step(layout, contrastive, optax.sgd(0.1), accumulate=2)
    batch = {name: jax.ShapeDtypeStruct((ROWS, size), jnp.float32) for name, size in (("images", 12), ("texts", 20))}
    with pytest.warns(UserWarning, match=r"(?s)float32\[4,4\].*Each part of 4 has the pairs of its 4 rows.*all_reduce"):
        step.lower(step.abstract(), batch)


def test_a_mean_with_a_count_of_one_is_not_warned_of():
    def mean(model, batch):
        total, count = squares(model, batch)
        return total / count, 1

    assert loss_of(mean, 4) == pytest.approx(loss_of(squares, 1), rel=1e-5)
