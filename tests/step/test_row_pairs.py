"""A loss that compares the rows of a batch with each other, in microbatches."""

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
    with pytest.warns(UserWarning, match=r"pairs the rows of a batch.*test_row_pairs.py:\d+.*its 4 rows alone"):
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
