"""Cross entropy: what it computes, what its backward pass keeps, and that both modes of differentiation see it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pairwise import some

from jaxpar.step.losses import cross_entropy, next_token_loss

LOGITS = jnp.asarray(3 * np.random.default_rng(0).normal(size=(2, 3, 16)).astype(np.float32))
LABELS = jnp.array([[0, 5, 15], [7, 7, 2]])


def plain(logits, labels):
    return -jnp.take_along_axis(jax.nn.log_softmax(logits), labels[..., None], axis=-1)[..., 0]


def summed(losses):
    weights = jnp.arange(1.0, 7.0).reshape(2, 3)  # a mask, or anything else that weighs tokens
    return lambda logits: jnp.sum(weights * losses(logits, LABELS))


DERIVATIVES = {
    "backward": jax.grad,
    "forward": jax.jacfwd,
    "forward over backward": jax.hessian,
    "backward over backward": lambda f: jax.jacrev(jax.grad(f)),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    "derivative",
    some(
        DERIVATIVES.values(),
        [],
        [DERIVATIVES["backward"], DERIVATIVES["forward"], DERIVATIVES["backward over backward"]],
    ),
    ids=DERIVATIVES,
)
def test_every_derivative_equals_that_of_log_softmax(derivative):
    got, want = derivative(summed(cross_entropy))(LOGITS), derivative(summed(plain))(LOGITS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_keeps_the_logits_as_they_are_and_numbers_per_row():
    _, backward = jax.vjp(lambda logits: cross_entropy(logits, LABELS), LOGITS.astype(jnp.bfloat16))
    kept = [x for x in jax.tree.leaves(backward) if x.size >= LOGITS.size]
    assert [(x.dtype, x.shape) for x in kept] == [(jnp.bfloat16, LOGITS.shape)]


@pytest.mark.nightly
def test_a_label_that_is_none_has_no_gradient():
    labels = LABELS.at[0, 1].set(16).at[1, 0].set(-1)
    grads = jax.grad(lambda logits: jnp.nansum(cross_entropy(logits, labels)))(LOGITS)
    assert not grads[(0, 1), (1, 0)].any()
    assert grads[0, 0].any()


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    ("dtype", "vocab"),
    [
        pytest.param(jnp.uint8, 256, marks=pytest.mark.slow),
        pytest.param(jnp.uint8, 300, marks=pytest.mark.slow),
        (jnp.int8, 128),
        pytest.param(jnp.uint16, 300, marks=pytest.mark.slow),
    ],
)
def test_labels_in_few_bits_are_the_numbers_that_they_are(dtype, vocab):
    logits = jax.random.normal(jax.random.key(0), (4, vocab))
    labels = jnp.array([0, 1, 100, 127])
    np.testing.assert_array_equal(cross_entropy(logits, labels.astype(dtype)), cross_entropy(logits, labels))


@pytest.mark.nightly
@pytest.mark.parametrize(
    "inputs", [pytest.param((2, 3, 4), marks=pytest.mark.slow), (2,)], ids=["embeddings", "one token a row"]
)
def test_next_token_takes_what_is_no_table_of_tokens(inputs):
    class Model:
        def __call__(self, x):
            return jnp.ones((*x.shape[:2], 5))

    targets = jnp.zeros(inputs[:2], jnp.int32)
    total, count = next_token_loss(Model(), {"inputs": jnp.ones(inputs), "targets": targets})["loss"]
    np.testing.assert_allclose(total / count, np.log(5), rtol=1e-6)
