"""Losses and layers with a backward pass of their own: the gradients that JAX derives, of fewer large arrays."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding

import jaxpar as jp
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.target import find_plugin
from jaxpar.models.own_backward import logits, swiglu
from jaxpar.step.losses import cross_entropy

ROWS, DIM, VOCAB = 256, 32, 4096
absent = pytest.mark.skipif(find_plugin() is not None, reason=f"compiling for absent GPUs: {find_plugin()}")


def plain_swiglu(gate, up):
    return jax.nn.silu(gate) * up


def plain_logits(x, head):
    return jnp.einsum("bsd,dv->bsv", x, head)


@pytest.mark.parametrize(
    ("own", "plain", "shapes"),
    [(swiglu, plain_swiglu, [(2, 3, 8)] * 2), (logits, plain_logits, [(2, 3, 8), (8, 5)])],
    ids=["swiglu", "logits"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
def test_an_own_backward_pass_is_that_of_jax_and_keeps_the_inputs_alone(own, plain, shapes, dtype):
    given = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]
    (out, backward), (want, derived) = jax.vjp(own, *given), jax.vjp(plain, *given)
    np.testing.assert_array_equal(out, want)
    near = 1e-5 if dtype == jnp.float32 else 2e-2
    for got, expected in zip(backward(out), derived(out), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=near, atol=near)
    assert sorted(x.shape for x in jax.tree.leaves(backward)) == sorted(shapes)


def gradients(x, head, labels):
    return jax.grad(lambda x, head: jnp.sum(cross_entropy(logits(x, head), labels)), argnums=(0, 1))(x, head)


@pytest.mark.slow
@absent
def test_loss_and_head_need_one_array_as_large_as_the_logits_on_a_gpu():
    device = jp.target_devices("h100:1x8")[0]
    shapes = [((1, ROWS, DIM), jnp.float32), ((DIM, VOCAB), jnp.float32), ((1, ROWS), jnp.int32)]
    given = [jax.ShapeDtypeStruct(*each, sharding=SingleDeviceSharding(device)) for each in shapes]
    temporary = compile_program(jax.jit(gradients).lower(*given), [device]).temporary
    assert 1 <= temporary / (4 * ROWS * VOCAB) < 1.5
