"""Stacks of layers' arrays between the passes: one layout, so that XLA copies none of them."""

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.jaxprs.stack_layouts import keep_stack_layouts

LAYERS, ROWS, SEQ, HEADS, DIM = 3, 2, 8, 2, 4


def loss(weights, x):
    def layer(x, weight):
        scores = jax.nn.softmax(jnp.einsum("rshd,rthd->rhst", x @ weight, x), axis=-1)
        return x + jnp.einsum("rhst,rthd->rshd", scores, x), jnp.sum(scores)

    x, totals = jax.lax.scan(layer, x, weights)
    return jnp.sum(x**2) + jnp.sum(totals)


def test_gradients_are_those_of_the_function():
    rng = np.random.default_rng(0)
    args = rng.normal(size=(LAYERS, DIM, DIM)), rng.normal(size=(ROWS, SEQ, HEADS, DIM))
    args = [jnp.asarray(arg, jnp.float32) for arg in args]
    gradients = jax.grad(loss, argnums=(0, 1))
    for found, expected in zip(jax.jit(keep_stack_layouts(gradients))(*args), gradients(*args), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5, atol=1e-6)


def test_layers_of_stacks_between_scans_are_constrained_where_they_are_made_and_read():
    def count(function):
        jaxpr = jax.make_jaxpr(function)(jnp.zeros((LAYERS, DIM, DIM)), jnp.zeros((ROWS, SEQ, HEADS, DIM))).jaxpr
        scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
        return [sum(inner.primitive.name == "layout_constraint" for inner in eqn.params["jaxpr"].eqns) for eqn in scans]

    assert count(jax.grad(loss)) == [0, 0]
    made, read = count(keep_stack_layouts(jax.grad(loss)))
    assert made == read > 0
    assert count(keep_stack_layouts(loss)) == [0]  # nothing is read by another scan
