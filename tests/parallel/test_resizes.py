"""`jax.image.resize` of images in pieces: each device interpolates its own rows."""

from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import given, settings
from hypothesis import strategies as st
from plain_loop import train
from test_images import OPTIMIZER, assert_equal, axes, collectives, images, loss, trained

import jaxpar as jp
from jaxpar.parallel.split_resizes import split_band

pytestmark = pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")
METHODS = [method.name.lower().replace("_", "-") for method in jax.image.ResizeMethod]


@pytest.mark.full
@settings(deadline=None)
@given(
    size=st.integers(8, 40), result=st.integers(8, 80), ways=st.sampled_from([2, 4, 8]),
    method=st.sampled_from(["nearest", "linear", "cubic", "lanczos3"]), antialias=st.booleans(),
)  # fmt: skip
def test_bands_of_devices_are_the_whole_matrix(size, result, ways, method, antialias):
    weights = np.asarray(jax.image.resize(jnp.eye(size), (result, size), method, antialias))
    band = split_band(weights, "height", ("height",), ways)
    piece, rows = band.piece, band.weights.shape[1]
    margin = ways * piece.rows + piece.count
    whole = np.zeros((ways * rows, margin + 2 * margin))
    for device in range(ways):
        first = margin + device * piece.rows + piece.offsets[device]
        whole[device * rows :][:rows, first : first + piece.count] = band.weights[device]
    np.testing.assert_array_equal(whole[:result, margin : margin + size], weights)
    assert np.count_nonzero(whole) == np.count_nonzero(weights)


@pytest.mark.parametrize(
    ("method", "result", "halo"),
    [
        ("nearest", 64, (0, 0)),
        ("nearest", 16, (0, 0)),
        ("linear", 64, (1, 1)),
        ("linear", 16, (1, 1)),
        ("cubic", 64, (2, 2)),
    ],
)
def test_a_halo_is_what_an_interpolation_reaches_beyond_a_piece(method, result, halo):
    weights = np.asarray(jax.image.resize(jnp.eye(32), (result, 32), method))
    assert split_band(weights, "height", ("height",), 4).piece.halo == halo


class Resized(nnx.Module):
    """Halves an image, and resizes it to what it was by one method or another."""

    def __init__(self, method, sizes, rngs: nnx.Rngs):
        self.method, self.sizes = method, sizes
        self.stem = nnx.Conv(3, 8, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Conv(8, 4, (3, 3), rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.stem(images))
        return self.head(jax.image.resize(x, (x.shape[0], *self.sizes, x.shape[-1]), self.method))


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("method", "parallel"),
    [
        ("nearest", jp.Parallel(data=2, height=2, tensor=2)),
        ("bilinear", jp.Parallel(height=4, width=2)),
        pytest.param("cubic", jp.Parallel(height=8), marks=pytest.mark.slow),
        pytest.param("lanczos3", jp.Parallel(data=2, height=4), marks=pytest.mark.slow),
        pytest.param("area", jp.Parallel(fsdp=2, height=4), marks=pytest.mark.slow),
    ],
    ids=lambda value: value if isinstance(value, str) else axes(value),
)
@pytest.mark.parametrize("sizes", [(32, 32), pytest.param((45, 20), marks=pytest.mark.slow)], ids=str)
def test_a_model_that_resizes_trains_as_flax_alone_on_one_device(method, sizes, parallel):
    def model(rngs):
        return Resized(method, sizes, rngs)

    batch = images((4, 32, 32, 3), labels=(4, *sizes))
    assert_equal(trained(model, batch, parallel), train(model, model, loss, OPTIMIZER, batch))


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("method", ["nearest", "linear"])
def test_a_resize_exchanges_rows_and_gathers_no_image(method):
    batch = images((2, 32, 32, 3), labels=(2, 32, 32))
    step = trained(lambda rngs: Resized(method, (32, 32), rngs), batch, jp.Parallel(height=8), steps=1)[2]
    kinds = Counter(kind for _, kind in collectives(step).elements())
    assert kinds["collective-permute"] > 4  # of the two convolutions: forward of both, backward of the second
    assert not kinds["all-gather"] + kinds["all-to-all"]


@pytest.mark.nightly
def test_what_is_no_image_is_resized_as_ever():
    class Positions(nnx.Module):
        """Rows of positions that are resized to the image, in bfloat16, in integers and by names of the enum."""

        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)
            self.table = nnx.Param(jax.random.normal(rngs.params(), (8, 8, 4)))

        def __call__(self, images):
            x = self.conv(images)
            table = jax.image.resize(self.table[...], x.shape[1:], "linear")
            whole = jax.image.resize(jnp.arange(16).reshape(1, 4, 4, 1), (1, 16, 16, 1), jax.image.ResizeMethod.LINEAR)
            nearest = jax.image.resize((images > 0).astype(jnp.int32), (4, 32, 32, 3), "nearest")[:, ::2, ::2]
            return x + table + whole + nearest.mean(axis=-1, keepdims=True)

    batch = images((4, 16, 16, 3), labels=(4, 16, 16))
    expected = train(Positions, Positions, loss, OPTIMIZER, batch)
    assert_equal(trained(Positions, batch, jp.Parallel(height=2, width=2, data=2)), expected)


@pytest.mark.nightly
def test_images_of_fewer_rows_than_devices_are_resized_whole_and_the_step_says_so():
    class Small(nnx.Module):
        def __init__(self, rngs: nnx.Rngs):
            self.conv = nnx.Conv(3, 4, (3, 3), rngs=rngs)

        def __call__(self, images):
            small = jax.image.resize(self.conv(images), (4, 4, 4, 4), "linear")
            return jax.image.resize(small, (4, 16, 16, 4), "linear")

    batch = images((4, 16, 16, 3), labels=(4, 16, 16))
    losses, params, step = trained(Small, batch, jp.Parallel(height=8))
    assert_equal((losses, params), train(Small, Small, loss, OPTIMIZER, batch))
    assert any("from 16 to 4 rows of height run whole on each of 8" in note for note in step.compiler.implementations)


@pytest.mark.nightly
def test_outside_of_a_step_jax_is_as_it_was():
    before = jax.image.resize
    trained(lambda rngs: Resized("linear", (32, 32), rngs), images((4, 32, 32, 3), labels=(4, 32, 32)),
            jp.Parallel(height=2), devices=jax.devices()[:2], steps=1)  # fmt: skip
    assert jax.image.resize is before
