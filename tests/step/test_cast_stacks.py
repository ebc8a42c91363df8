"""Parameters of stacked layers are cast before the scan that only casts them, and gradients are those of JAX."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxpar.jaxprs.casts import cast_stacks

PARAMS = {name: jax.random.normal(jax.random.key(i), (3, 4, 4)) for i, name in enumerate(("called", "plain", "both"))}


def loss(params, x, *, checkpoint=False):
    def layer(x, own):
        called = jax.jit(lambda w: x @ w.astype(x.dtype))(own["called"])
        y = called + jnp.tanh(x @ own["plain"].astype(x.dtype)) @ own["both"].astype(x.dtype)
        return y + jnp.mean(own["both"]).astype(x.dtype), None

    layer = jax.checkpoint(layer, prevent_cse=False) if checkpoint else layer
    return jnp.sum(jax.lax.scan(layer, x, params)[0].astype(jnp.float32))


def stacks(function):
    """The dtypes of the stacks that the scan of a function reads, by name of the parameter."""
    jaxpr = jax.make_jaxpr(function)(PARAMS, jnp.ones((2, 4), jnp.bfloat16)).jaxpr
    (scan,) = (eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan")
    return dict(zip(sorted(PARAMS), [str(var.aval.dtype) for var in scan.invars if var.aval.ndim == 3], strict=True))


def test_a_stack_is_cast_before_the_scan_unless_something_reads_it_uncast():
    assert set(stacks(loss).values()) == {"float32"}
    assert stacks(cast_stacks(loss)) == {"both": "float32", "called": "bfloat16", "plain": "bfloat16"}


def test_a_layer_with_a_checkpoint_casts_by_itself():
    """It casts again in its backward, so that no cast stack is saved."""
    assert set(stacks(cast_stacks(partial(loss, checkpoint=True))).values()) == {"float32"}


@pytest.mark.parametrize("outside", [False, True], ids=["scan", "scan in a call"])
def test_values_and_gradients_are_bitwise_those_of_jax(outside):
    x = jax.random.normal(jax.random.key(9), (2, 4), jnp.bfloat16)
    rewritten = cast_stacks(jax.jit(loss) if outside else loss)
    for ours, plain in zip(
        *(jax.tree.leaves(jax.value_and_grad(function, (0, 1))(PARAMS, x)) for function in (rewritten, loss)),
        strict=True,
    ):
        assert ours.dtype == plain.dtype
        np.testing.assert_array_equal(np.asarray(ours, np.float32), np.asarray(plain, np.float32))
