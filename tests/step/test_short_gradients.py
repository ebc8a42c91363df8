"""Gradients of parameters in 16 bits: added up in float32, divided by the count, and only then rounded.

The mean gradient here is about 45 in its largest entry, the sum over all examples far above 65504, the largest float16.
The oracle is a product of matrices in float64.
"""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from pairwise import some
from tiny import scanned, stack

import jaxpar as jp

ROWS, DIM = 4096, 16
SHORT = {jnp.float16: 1e-3, jnp.bfloat16: 4e-3}


class Matrix(nnx.Module):
    def __init__(self, rngs, dtype, computes=jnp.float32):
        self.w = nnx.Linear(DIM, DIM, use_bias=False, param_dtype=dtype, dtype=computes, rngs=rngs)

    def __call__(self, x):
        return self.w(x).astype(jnp.float32)


class Layers(nnx.Module):
    """Layers that pass their input on unchanged at first, and a head whose gradient and whose input's are large."""

    def __init__(self, rngs, dtype):
        zeros = nnx.with_partitioning(nnx.initializers.zeros, ("embed", "mlp"))

        def made(rngs):
            return nnx.Linear(DIM, DIM, use_bias=False, param_dtype=dtype, kernel_init=zeros, rngs=rngs)

        self.blocks = stack(rngs, 4, made)
        self.head = Matrix(rngs, dtype)

    def __call__(self, x):
        return self.head(jp.pipelined(self.layers, x.astype(self.head.w.kernel.dtype)))

    def layers(self, x):
        return scanned(lambda x, block: x + block(x).astype(x.dtype), x, self.blocks)


def loss(model, batch):
    return jnp.sum((model(batch["x"]) - batch["y"]) ** 2), jnp.float32(batch["x"].shape[0])


def kept():
    """Returns an optimizer that changes nothing and keeps the gradients in float32."""
    wide = lambda tree: jax.tree.map(lambda x: x.astype(jnp.float32), tree)  # noqa: E731
    return optax.GradientTransformation(
        lambda params: wide(jax.tree.map(jnp.zeros_like, params)),
        lambda grads, state, params=None: (jax.tree.map(jnp.zeros_like, grads), wide(grads)),
    )


def batch(scale=10.0):
    rng = np.random.default_rng(3)
    x = rng.normal(size=(ROWS, DIM)).astype(np.float32)
    y = x @ np.full((DIM, DIM), 2.0) + rng.normal(size=(ROWS, DIM))
    return {"x": x, "y": (scale * y).astype(np.float32)}


def gradient(model, sizes, *, count=None, loss=loss, **numerics):
    """Returns the first step's metrics and gradients, with the parameters that they are of."""
    layout = jp.compose(model, jp.Parallel(**sizes), jax.devices()[: count or 8])
    state = jp.init_state(layout, kept())
    params = jax.device_get(state.params)
    state, metrics = jp.train_step(layout, loss, kept(), **numerics)(state, batch())
    return jax.device_get(metrics), jax.device_get(state.optimizer), params


def assert_close(gradient, kernel, tolerance):
    x, y = (batch()[name].astype(np.float64) for name in "xy")
    true = 2 * x.T @ (x @ np.asarray(kernel, np.float64) - y) / ROWS
    assert np.linalg.norm(gradient - true) < tolerance * np.linalg.norm(true)
    return np.linalg.norm(true)


@pytest.mark.spread(0)
@pytest.mark.parametrize("dtype", SHORT, ids=["float16", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "accumulate"),
    [
        ({"data": 8}, 1),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in (
                ({"data": 8}, 64),
                ({"fsdp": 8, "zero": 1}, 8),
                ({"fsdp": 4, "data": 2, "zero": 2}, 2),
                ({"fsdp": 8}, 8),
                ({"data": 2, "fsdp": 2, "tensor": 2}, 2),
            )
        ),
    ],
    ids=str,
)
def test_gradients_of_short_parameters_are_those_of_the_mean(dtype, sizes, accumulate):
    metrics, made, params = gradient(partial(Matrix, dtype=dtype), sizes, accumulate=accumulate)
    norm = assert_close(made["w"]["kernel"], params["w"]["kernel"], SHORT[dtype])
    np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=SHORT[dtype])


@pytest.mark.parametrize("accumulate", [1, 2])
def test_float32_parameters_that_are_multiplied_in_float16_do_not_overflow_by_accumulation(accumulate):
    model = partial(Matrix, dtype=jnp.float32, computes=jnp.float16)
    _, made, params = gradient(model, {"data": 8}, accumulate=accumulate)
    assert_close(made["w"]["kernel"], params["w"]["kernel"], 2e-3)


@pytest.mark.spread(0)
@pytest.mark.parametrize(
    "exchange",
    [jp.Exchange("local", every=4), pytest.param(jp.Exchange("powersgd", smallest=128), marks=pytest.mark.slow)],
    ids=["local", "powersgd"],
)
def test_replicas_that_step_apart_add_up_in_float32(exchange):
    model = partial(Matrix, dtype=jnp.float16)
    metrics, _, params = gradient(model, {"data": 4, "exchange": exchange}, count=4, accumulate=2)
    x, y = (batch()[name].astype(np.float64).reshape(4, -1, DIM) for name in "xy")
    each = [
        np.linalg.norm(2 * a.T @ (a @ params["w"]["kernel"].reshape(-1, DIM, DIM)[0] - b) / len(a))
        for a, b in zip(x, y, strict=True)
    ]
    expected = np.mean(each) if exchange.replicas_differ else None
    assert np.isfinite(metrics["grad_norm"])
    if expected is not None:
        np.testing.assert_allclose(metrics["grad_norm"], expected, rtol=1e-3)


PIPES = {
    "gpipe": {"pipe": 4, "data": 2, "pipeline": jp.Pipeline(schedule="gpipe", microbatches=4)},
    "zero 2": {"pipe": 2, "fsdp": 4, "zero": 2, "pipeline": jp.Pipeline(schedule="1f1b", microbatches=2)},
    "spread": {"pipe": 4, "data": 2, "pipeline": jp.Pipeline(schedule="gpipe", microbatches=4, head="spread")},
}


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:Layers. each device computes")  # the head is too small for its names
@pytest.mark.parametrize("sizes", some(PIPES.values(), [PIPES["zero 2"]]), ids=PIPES)
def test_pipelines_make_gradients_of_the_mean_in_float16(sizes):
    metrics, made, params = gradient(partial(Layers, dtype=jnp.float16), sizes)
    norm = assert_close(made["head"]["w"]["kernel"], params["head"]["w"]["kernel"], 1e-3)
    # the layers are the identity: the gradient of each is that of the input, by the input
    x, y = (batch()[name].astype(np.float64) for name in "xy")
    kernel = np.asarray(params["head"]["w"]["kernel"], np.float64)
    true = x.T @ (2 * (x @ kernel - y) @ kernel.T) / ROWS
    for each in made["blocks"]["kernel"]:
        assert np.linalg.norm(each - true) < 1e-2 * np.linalg.norm(true)
    np.testing.assert_allclose(metrics["grad_norm"], np.hypot(norm, 2 * np.linalg.norm(true)), rtol=1e-2)


def test_a_count_that_the_model_computes_is_refused_in_a_pipeline_of_float16():
    def counts(model, batch):
        losses = (model(batch["x"]) - batch["y"]) ** 2
        return jnp.sum(losses), jnp.sum(losses > 1).astype(jnp.float32)

    with pytest.raises(jp.JaxparError, match=r"(?s)float16, and a loss whose count follows.*bfloat16"):
        gradient(partial(Layers, dtype=jnp.float16), PIPES["gpipe"], loss=counts)


def test_a_norm_of_float16_is_taken_in_float32_and_clips_by_it():
    """256 squared is beyond float16, and 40 entries of 200 have a norm of 1265."""
    optimizer = optax.chain(optax.clip_by_global_norm(1.0), optax.sgd(1.0))

    class Numbers(nnx.Module):
        def __init__(self, rngs):
            self.w = nnx.Param(jnp.zeros(40, jnp.float16))

        def __call__(self, x):
            return x @ self.w[...]

    layout = jp.compose(Numbers, jp.Parallel(), jax.devices()[:1])
    step = jp.train_step(layout, lambda m, b: (jnp.sum(m(b["x"]).astype(jnp.float32)), 8.0), optimizer)
    state, metrics = step(jp.init_state(layout, optimizer), {"x": np.full((8, 40), 200, np.float16)})
    np.testing.assert_allclose(metrics["grad_norm"], 200 * 40**0.5, rtol=1e-6)
    np.testing.assert_allclose(state.params["w"], -(40**-0.5), rtol=2e-3)
