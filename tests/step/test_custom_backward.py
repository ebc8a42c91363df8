"""Losses and layers with a backward pass of their own: the gradients that JAX derives, of fewer large arrays."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import SingleDeviceSharding
from pairwise import some

import jaxpar as jp
from jaxpar.inspector.compiled import compile_program
from jaxpar.mesh.target import missing_plugin
from jaxpar.models.custom_gradients import activate, float32_attention, geglu, logits, normalize, swiglu, unmerged_input
from jaxpar.models.islands import unsharded_attention
from jaxpar.models.remat import remat
from jaxpar.step.losses import cross_entropy

ROWS, DIM, VOCAB = 256, 32, 2**17
of_jax = jax.nn.dot_product_attention
absent = pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")


def plain_geglu(gate, up, approximate):
    return jax.nn.gelu(gate, approximate=approximate) * up


def plain_swiglu(gate, up):
    return jax.nn.silu(gate) * up


def plain_norm(x, scale, *, centered):
    y = x.astype(jnp.float32)
    y = y - jnp.mean(y, axis=-1, keepdims=True) if centered else y
    y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + 1e-5)
    return y.astype(x.dtype) * scale


def plain_logits(x, head):
    return jnp.einsum("bsd,dv->bsv", x, head)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("own", "plain", "shapes"),
    [
        *(
            (partial(normalize, eps=1e-5, centered=each), partial(plain_norm, centered=each), [(2, 3, 8), (8,)])
            for each in (False, True)
        ),
        (swiglu, plain_swiglu, [(2, 3, 8)] * 2),
        (partial(geglu, approximate=True), partial(plain_geglu, approximate=True), [(2, 3, 8)] * 2),
        (partial(geglu, approximate=False), partial(plain_geglu, approximate=False), [(2, 3, 8)] * 2),
        (logits, plain_logits, [(2, 3, 8), (8, 5)]),
        (partial(activate, activation="gelu_tanh"), jax.nn.gelu, [(2, 3, 8)]),
        (partial(activate, activation="gelu"), partial(jax.nn.gelu, approximate=False), [(2, 3, 8)]),
        (partial(activate, activation="silu"), jax.nn.silu, [(2, 3, 8)]),
    ],
    ids=["rms norm", "layer norm", "swiglu", "geglu by tanh", "geglu", "logits", "gelu by tanh", "gelu", "silu"],
)
@pytest.mark.parametrize("dtype", [jnp.float32, pytest.param(jnp.bfloat16, marks=pytest.mark.slow)])
def test_an_own_backward_pass_is_that_of_jax_and_keeps_the_inputs_alone(own, plain, shapes, dtype):
    given = [jax.random.normal(jax.random.key(i), shape, dtype) for i, shape in enumerate(shapes)]
    (out, backward), (want, derived) = jax.vjp(own, *given), jax.vjp(plain, *given)
    np.testing.assert_array_equal(out, want)
    near = 1e-5 if dtype == jnp.float32 else 2e-2
    for got, expected in zip(backward(out), derived(out), strict=True):
        assert got.dtype == dtype
        np.testing.assert_allclose(np.float32(got), np.float32(expected), rtol=near, atol=near)
    kept = [x.shape for x in jax.tree.leaves(backward) if x.shape != (2, 3, 1)]  # and a number for each token
    assert sorted(kept) == sorted(shapes)


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("causal", "groups"),
    some([(True, 4), (True, 2), (False, 4), (False, 2)], [(False, 4)], [(True, 2)]),
)
def test_attention_in_float32_has_the_values_and_derivatives_of_jax(causal, groups):
    shapes = [(2, 9, 4, 8), (2, 9, groups, 8), (2, 9, groups, 8)]
    given, change = ([jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate(shapes, n)] for n in (0, 3))
    run = lambda *qkv: unsharded_attention(*qkv, causal=causal)  # noqa: E731
    plain = lambda *qkv: of_jax(*qkv, is_causal=causal)  # noqa: E731
    for got, want in zip(jax.jvp(run, given, change), jax.jvp(plain, given, change), strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
    # also once more forward for the backward pass, and one row at a time
    rows = jax.vmap(lambda *qkv: run(*(x[None] for x in qkv))[0])
    out, derived = jax.vjp(plain, *given)
    for f in (run, jax.checkpoint(run), rows):
        made, backward = jax.vjp(f, *given)
        np.testing.assert_allclose(made, out, rtol=1e-5, atol=1e-6)
        for got, expected in zip(backward(change[0]), derived(change[0]), strict=True):
            np.testing.assert_allclose(got, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16, jnp.float64], ids=str)
def test_attention_in_any_other_dtype_is_that_of_jax(dtype):
    with jax.enable_x64(True):
        given = [jax.ShapeDtypeStruct((2, 8, 4, 8), dtype)] * 3
        texts = [
            str(jax.make_jaxpr(f)(*given))
            for f in (lambda *qkv: unsharded_attention(*qkv, causal=True), lambda *qkv: of_jax(*qkv, is_causal=True))
        ]
    assert texts[0] == texts[1]


@pytest.mark.nightly
@absent
def test_attention_in_float32_computes_its_shares_once_on_a_gpu():
    """Left to itself XLA computes them again for the backward pass, and for that keeps scores."""
    device = jp.target_devices("h100:1x8")[0]
    given = jax.ShapeDtypeStruct((2, 256, 4, 64), jnp.float32, sharding=SingleDeviceSharding(device))

    def exponentials(attention):
        def loss(x, w):
            for _ in range(2):
                x = x + attention(x, x * w, x + w)
            return jnp.sum(x * x)

        made = compile_program(jax.jit(jax.grad(loss, argnums=(0, 1))).lower(given, given), [device])
        return made.text.count(" exponential("), made.temporary

    own, plain = (
        exponentials(lambda *qkv: float32_attention(*qkv, causal=True)),
        exponentials(partial(of_jax, is_causal=True)),
    )
    assert own[0] == 2 < plain[0]
    assert own[1] < plain[1]


def gradients(x, head, labels):
    return jax.grad(lambda x, head: jnp.sum(cross_entropy(logits(x, head), labels)), argnums=(0, 1))(x, head)


@pytest.mark.nightly
@absent
def test_loss_and_head_need_one_array_as_large_as_the_logits_on_a_gpu():
    device = jp.target_devices("h100:1x8")[0]
    shapes = [((1, ROWS, DIM), jnp.float32), ((DIM, VOCAB), jnp.float32), ((1, ROWS), jnp.int32)]
    given = [jax.ShapeDtypeStruct(*each, sharding=SingleDeviceSharding(device)) for each in shapes]
    temporary = compile_program(jax.jit(gradients).lower(*given), [device]).temporary
    assert 1 <= temporary / (4 * ROWS * VOCAB) < 1.5


def test_a_norm_after_a_loop_adds_up_its_rows_before_the_loops_backward_pass():
    """Else XLA may keep what the scale's gradient is the sum of, as large as the stream, while the loop runs."""
    x, scale = jnp.ones((2, 3, 4)), jnp.ones(4)

    def barriers(looped):
        loss = lambda x, scale: jnp.sum(normalize(x, scale, 1e-5, False, looped))  # noqa: E731
        made = jax.make_jaxpr(jax.grad(loss, (0, 1)))(x, scale)
        return [[var.aval.shape for var in eqn.outvars] for eqn in made.eqns if "barrier" in eqn.primitive.name]

    assert barriers(looped=True)[-1] == [(2, 3, 4), (2, 4)]
    assert (2, 4) not in barriers(looped=False)[-1]
    grads = [
        jax.grad(lambda x, scale, i=i: jnp.sin(normalize(x, scale, 1e-5, False, i)).sum(), (0, 1))(x, scale)
        for i in (False, True)
    ]
    jax.tree.map(partial(np.testing.assert_allclose, rtol=1e-6), *grads)


@pytest.mark.parametrize(("policy", "matmuls"), [("none", 9), ("dots", 9), ("all_dots", 9), ("full", 12)])
def test_a_matmul_that_xla_does_not_join_is_kept_as_others_are(policy, matmuls):
    def summed(x_bsd, gate_df, up_df, down_fd):
        gate, up = jnp.einsum("bsd,df->bsf", unmerged_input(x_bsd), gate_df), jnp.einsum("bsd,df->bsf", x_bsd, up_df)
        return jnp.sum(jnp.einsum("bsf,fd->bsd", swiglu(gate, up), down_fd) ** 2)

    given = [jnp.ones(shape) for shape in ((1, 4, 2), (2, 3), (2, 3), (3, 2))]
    program = jax.make_jaxpr(jax.grad(remat(summed, policy), (0, 1, 2, 3)))(*given)
    assert str(program).count("dot_general[") == matmuls  # three forward, six backward, and what is computed again


@pytest.mark.skipif(jax.__version_info__ < (0, 11), reason="XLA of jax 0.10 forgets barriers before it fuses")
def test_the_gradients_of_swiglu_are_computed_once_on_processors():
    def summed(x_bsd, gate_df, up_df, down_fd):
        gate, up = (jnp.einsum("bsd,df->bsf", x_bsd, each) for each in (gate_df, up_df))
        return jnp.sum(jnp.square(jnp.einsum("bsf,fd->bsd", swiglu(gate, up), down_fd)))

    shapes = (2, 256, 64), (64, 256), (64, 256), (256, 64)
    gradients = jax.jit(jax.grad(jax.checkpoint(summed), (1, 2, 3)))
    text = gradients.lower(*(jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes)).compile().as_text()
    parts = [part for part in text.split("\n\n") if "fused" in part[:99]]
    products = [part.count(" multiply(") for part in parts if " transpose(" in part]
    # three matmuls read with dims exchanged: the gradients of gate and up as they are, and gate * sigmoid(gate) * up
    assert sorted(products) == [0, 0, 2]
