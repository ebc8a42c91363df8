"""Gradients of stacked layers are summed over `data` once, after the scan that makes them, where they are small."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar as jp
from jaxpar.bench.overhead.program import compiled
from jaxpar.pipeline.jaxprs import summed_once as room

SHAPE = {"vocab": 32, "seq": 16, "layers": 6, "dim": 16, "heads": 2, "hidden": 32}


def launches():
    layout = jp.compose(partial(jp.Decoder, jp.DecoderSettings(**SHAPE)), jp.Parallel(data=8), jax.devices())
    step = jp.train_step(layout, jp.next_token, optax.sgd(0.1), remat="full")
    batch = {name: jax.ShapeDtypeStruct((16, 16), jnp.int32) for name in ("inputs", "targets")}
    return compiled(step.subject(batch).lowered, layout.on).launches


def test_the_sums_of_all_layers_are_one(monkeypatch):
    assert launches() < SHAPE["layers"]
    monkeypatch.setattr(room, "SMALL", 0)
    assert launches() > SHAPE["layers"], "sums of large layers travel while the next is computed"


@pytest.mark.parametrize("again", [True, False])
def test_gradients_are_those_of_jax(again):
    """Also of layers that look at the whole batch, and of what is read otherwise than in a matmul."""

    def layer(x, own):
        matrix, bias, scale, other = own
        y = jnp.einsum("bsd,df->bsf", x * scale, matrix) + bias
        return x + jnp.tanh(y - jnp.mean(y, axis=0)) + jnp.mean(other), None

    def loss(params, x):
        scanned = jax.checkpoint(layer, prevent_cse=False) if again else layer
        return jnp.sum(jnp.square(jax.lax.scan(scanned, x, params)[0]))

    keys = jax.random.split(jax.random.key(0), 5)
    shapes = (3, 8, 8), (3, 8), (3, 8), (3, 8, 4)
    params = tuple(jax.random.normal(key, shape) for key, shape in zip(keys, shapes, strict=False))
    x = jax.random.normal(keys[4], (8, 4, 8))
    layout = jp.compose(partial(jp.Decoder, jp.DecoderSettings(**SHAPE)), jp.Parallel(data=8), jax.devices())
    with jax.set_mesh(layout.on):
        found = jax.jit(room.summed_once(jax.grad(loss), "data", 4))(params, x)
        made = jax.make_jaxpr(room.summed_once(jax.grad(loss), "data", 4))(params, x)
    assert str(made).count("f32[3,4,8,8]"), "a matrix of each replica"
    jax.tree.map(partial(np.testing.assert_allclose, rtol=2e-5, atol=1e-5), found, jax.grad(loss)(params, x))
