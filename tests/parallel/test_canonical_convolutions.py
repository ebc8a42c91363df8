"""Gradients of convolutions in loops: on processors in the form that XLA runs fast, on GPUs as JAX writes them."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from test_images import OPTIMIZER, assert_equal, images, loss

import jaxpar as jp
from jaxpar.parallel.split_windows import run_canonical

CANONICAL = {"bf_io->bf", "b0f_0io->b0f", "b01f_01io->b01f", "b012f_012io->b012f"}


class Strided(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.down = nnx.Conv(8, 8, (3, 3), strides=2, kernel_dilation=1, rngs=rngs)
        self.head = nnx.Conv(8, 4, (1, 1), rngs=rngs)

    def __call__(self, images):
        return self.head(nnx.relu(self.down(nnx.relu(self.first(images)))))


def labels(program):
    return set(re.findall(r"dim_labels=(\w+->\w+)", program.as_text()))


@pytest.mark.nightly
def test_a_step_that_accumulates_has_convolutions_of_one_form():
    batch = images((8, 16, 16, 3), labels=(8, 8, 8))
    results = []
    for accumulate in (1, 2):
        layout = jp.compose(Strided, jp.Parallel(data=2), devices=jax.devices()[:2])
        step = jp.train_step(layout, loss, OPTIMIZER, accumulate=accumulate)
        state, metrics = step(jp.init_state(layout, OPTIMIZER, seed=0), batch)
        results.append(([float(metrics["loss"])], jax.tree.map(np.asarray, state.params)))
        assert labels(next(iter(step.programs.values()))) <= CANONICAL
    assert_equal(*results)


def test_a_program_for_gpus_is_as_jax_writes_it():
    pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
    layout = jp.compose(Strided, jp.Parallel(data=8), jp.target_devices("h100:1x8"))
    batch = {
        "images": jax.ShapeDtypeStruct((8, 16, 16, 3), jnp.float32),
        "labels": jax.ShapeDtypeStruct((8, 8, 8), jnp.int32),
    }
    step = jp.train_step(layout, loss, optax.sgd(0.1))
    text = step.lower(step.abstract(), batch).as_text()
    assert "[f, 0, 1, b]x[i, 0, 1, o]->[0, 1, b, f]" in text


@pytest.mark.parametrize("dims", ["NCHW OIHW NCHW", "CHWN IHWO HWNC", "NHWC HWIO NHWC"])
def test_a_convolution_of_any_dimension_numbers_is_the_same(dims):
    numbers, dims = np.random.default_rng(0), dims.split()
    image = numbers.normal(size=[{"N": 2, "C": 4, "H": 9, "W": 7}[dim] for dim in dims[0]]).astype(np.float32)
    kernel = numbers.normal(size=[{"O": 6, "I": 4, "H": 3, "W": 2}[dim] for dim in dims[1]]).astype(np.float32)
    settings = {"window_strides": (2, 1), "padding": ((1, 0), (0, 1)), "lhs_dilation": (1, 2), "rhs_dilation": (2, 1)}
    expected = jax.lax.conv_general_dilated(image, kernel, dimension_numbers=tuple(dims), **settings)

    def bind(images, kernel, **params):
        return jax.lax.conv_general_dilated(images, kernel, **params)

    shapes = jax.lax.conv_dimension_numbers(image.shape, kernel.shape, tuple(dims))
    counts = {"feature_group_count": 1, "batch_group_count": 1}
    result = run_canonical(bind, image, kernel, **settings, **counts, dimension_numbers=shapes)
    np.testing.assert_allclose(result, expected, rtol=1e-5, atol=1e-5)
