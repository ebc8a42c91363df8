"""Cross entropy: what it computes, what its backward pass keeps, and that both modes of differentiation see it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.step.losses import cross_entropy

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


@pytest.mark.slow
@pytest.mark.parametrize("derivative", DERIVATIVES.values(), ids=DERIVATIVES)
def test_every_derivative_equals_that_of_log_softmax(derivative):
    got, want = derivative(summed(cross_entropy))(LOGITS), derivative(summed(plain))(LOGITS)
    np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)


def test_the_backward_pass_keeps_the_logits_as_they_are_and_numbers_per_row():
    _, backward = jax.vjp(lambda logits: cross_entropy(logits, LABELS), LOGITS.astype(jnp.bfloat16))
    kept = [x for x in jax.tree.leaves(backward) if x.size >= LOGITS.size]
    assert [(x.dtype, x.shape) for x in kept] == [(jnp.bfloat16, LOGITS.shape)]


def test_a_label_that_is_none_has_no_gradient():
    labels = LABELS.at[0, 1].set(16).at[1, 0].set(-1)
    grads = jax.grad(lambda logits: jnp.nansum(cross_entropy(logits, labels)))(LOGITS)
    assert not grads[(0, 1), (1, 0)].any()
    assert grads[0, 0].any()
