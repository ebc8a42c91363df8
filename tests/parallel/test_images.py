"""Images in pieces: every device convolves its own rows, after an exchange with its neighbours."""

import re
from collections import Counter

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen as nn
from flax import nnx
from hypothesis import example, given, settings
from hypothesis import strategies as st
from jax import lax
from plain_loop import STEPS, train

import jaxpar as jp
from jaxpar.parallel.image_pieces import Window, split_window
from jaxpar.parallel.shard_cards import image_card

OPTIMIZER = optax.sgd(0.1)
# pieces of a few rows: the gradient of an image is computed for the rows of the halo too
pytestmark = pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")


def axes(parallel):
    return " x ".join(f"{axis} {size}" for axis, size in parallel.sizes.items() if size > 1)


class Segmenter(nnx.Module):
    """A small U-Net: strided and dilated convolutions, pooling, norms, transposed convolutions, a skip connection."""

    def __init__(self, rngs: nnx.Rngs):
        self.stem = nnx.Conv(3, 8, (5, 5), rngs=rngs)
        self.norm = nnx.BatchNorm(8, rngs=rngs)
        self.down = nnx.Conv(8, 8, (3, 3), strides=2, rngs=rngs)
        self.groups = nnx.GroupNorm(8, num_groups=2, rngs=rngs)
        self.middle = nnx.Conv(8, 8, (3, 3), kernel_dilation=2, rngs=rngs)
        self.grouped = nnx.Conv(8, 8, (3, 3), feature_group_count=2, rngs=rngs)
        self.up = nnx.ConvTranspose(8, 8, (2, 2), strides=2, rngs=rngs)
        self.wide = nnx.ConvTranspose(8, 8, (3, 3), strides=2, rngs=rngs)
        self.head = nnx.Conv(16, 4, (1, 1), rngs=rngs)

    def __call__(self, images):
        first = nnx.relu(self.norm(self.stem(images)))
        x = nnx.max_pool(first, (2, 2), strides=(2, 2))
        x = nnx.relu(self.groups(self.down(x)))
        x = self.grouped(nnx.relu(self.middle(x)))
        x = self.wide(nnx.relu(self.up(x)))
        return self.head(jnp.concatenate([x, first], axis=-1))


class Classifier(nn.Module):
    """The CNN of Flax's MNIST example."""

    @nn.compact
    def __call__(self, x):
        x = nn.relu(nn.Conv(8, (3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = nn.relu(nn.Conv(16, (3, 3))(x))
        x = nn.avg_pool(x, window_shape=(2, 2), strides=(2, 2))
        x = x.reshape((x.shape[0], -1))
        return nn.Dense(10)(nn.relu(nn.Dense(32)(x)))


def loss(model, batch):
    """Sum and count of the cross-entropy, of every pixel or of every image."""
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"])
    return losses.sum(), losses.size


def images(shape, *, labels, classes=4):
    numbers = np.random.default_rng(0)
    return {
        "images": numbers.normal(size=shape).astype(np.float32),
        "labels": numbers.integers(0, classes, labels).astype(np.int32),
    }


def trained(model, batch, parallel, *, devices=None, steps=STEPS, **options):
    """Losses and parameters of a run."""
    layout = jp.compose(model, parallel, devices=devices)
    step = jp.train_step(layout, loss, OPTIMIZER, **options)
    state, losses = jp.init_state(layout, OPTIMIZER, seed=0), []
    for _ in range(steps):
        state, metrics = step(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, jax.tree.map(np.asarray, state.params), step


def assert_equal(result, expected):
    np.testing.assert_allclose(result[0], expected[0], rtol=1e-5)
    left, right = jax.tree.leaves(result[1]), jax.tree.leaves(expected[1])
    assert len(left) == len(right)
    for value, other in zip(left, right, strict=True):
        np.testing.assert_allclose(value, other, atol=1e-5)


@pytest.fixture(scope="module")
def segmented():
    batch = images((8, 32, 32, 3), labels=(8, 32, 32))
    return batch, train(Segmenter, Segmenter, loss, OPTIMIZER, batch)


@pytest.mark.nightly
@pytest.mark.parametrize(
    "parallel",
    [
        jp.Parallel(height=8),
        jp.Parallel(data=2, height=2, tensor=2),  # XLA's own split is wrong here
        pytest.param(jp.Parallel(height=4, width=2), marks=pytest.mark.slow),
        pytest.param(jp.Parallel(data=4, height=2), marks=pytest.mark.slow),
        pytest.param(jp.Parallel(height=2, tensor=4), marks=pytest.mark.slow),
        pytest.param(jp.Parallel(fsdp=2, height=4, zero=1), marks=pytest.mark.slow),
        pytest.param(jp.Parallel(width=8), marks=pytest.mark.slow),
    ],
    ids=axes,
)
def test_a_model_of_cut_images_trains_as_flax_alone_on_one_device(parallel, segmented):
    batch, expected = segmented
    assert_equal(trained(Segmenter, batch, parallel), expected)


@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [jp.Parallel(height=4, data=2), jp.Parallel(height=2, tensor=4)], ids=axes)
def test_a_linen_model_of_flax_is_not_edited(parallel):
    batch = images((8, 28, 28, 1), labels=(8,), classes=10)
    model = jp.from_linen(Classifier(), batch["images"])
    assert_equal(trained(model, batch, parallel), train(model, Classifier(), loss, OPTIMIZER, batch))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("options", [{"accumulate": 2}, {"remat": "full"}], ids=str)
def test_accumulation_and_rematerialization_change_nothing(options, segmented):
    batch, _ = segmented
    batch = {name: value[:4] for name, value in batch.items()}
    one = trained(Segmenter, batch, jp.Parallel(), devices=jax.devices()[:1], **options)
    assert_equal(trained(Segmenter, batch, jp.Parallel(height=4, data=2), **options), one)


class Pools(nnx.Module):
    """Overlapping windows, whose gradients XLA's own split gets wrong, with and without padding and strides."""

    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(3, 8, (3, 3), rngs=rngs)
        self.second = nnx.Conv(8, 4, (3, 3), rngs=rngs)

    def __call__(self, images):
        x = self.first(images) - 5.0  # below zero: a border of zeros would win
        x = nnx.max_pool(x, (3, 3), strides=(1, 1), padding="SAME")
        x = nnx.avg_pool(x, (3, 3), strides=(1, 1), padding="SAME", count_include_pad=False)
        x = x + nnx.min_pool(x, (5, 5), strides=(1, 1), padding="SAME")
        return self.second(nnx.max_pool(x, (3, 3), strides=(2, 2)))


@pytest.mark.spread(1)
@pytest.mark.nightly
@pytest.mark.parametrize("parallel", [jp.Parallel(height=8), jp.Parallel(data=2, height=2, tensor=2)], ids=axes)
def test_windows_of_pools_reach_into_other_pieces(parallel):
    batch = images((4, 33, 17, 3), labels=(4, 16, 8))
    assert_equal(trained(Pools, batch, parallel), train(Pools, Pools, loss, OPTIMIZER, batch))


class Volume(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.first = nnx.Conv(1, 4, (3, 3, 3), rngs=rngs)
        self.down = nnx.Conv(4, 4, (3, 3, 3), strides=2, rngs=rngs)
        self.up = nnx.ConvTranspose(4, 4, (2, 2, 2), strides=2, rngs=rngs)

    def __call__(self, images):
        return self.up(nnx.relu(self.down(nnx.relu(self.first(images)))))


@pytest.mark.nightly
def test_a_volume_is_cut_along_its_first_two_dims():
    batch = images((2, 16, 16, 8, 1), labels=(2, 16, 16, 8))
    one = trained(Volume, batch, jp.Parallel(), devices=jax.devices()[:1])
    assert_equal(trained(Volume, batch, jp.Parallel(height=4, width=2)), one)


# Windows: which rows a device needs.


def convolve(image, kernel, *, stride, padding, base, dilation):
    """A convolution along one dim. Shapes [rows], [taps]."""
    result = lax.conv_general_dilated(
        image[None, :, None], kernel[:, None, None], (stride,), [padding], lhs_dilation=(base,),
        rhs_dilation=(dilation,), dimension_numbers=("NHC", "HIO", "NHC"), precision=lax.Precision.HIGHEST,
    )  # fmt: skip
    return np.asarray(result)[0, :, 0]


def rows_of(piece, device, image):
    """The rows that a device convolves, taken from the whole image; zeros where there are none."""
    reach = 2 * piece.window.span + piece.rows * piece.ways
    padded = np.pad(image, (reach, reach))
    start = reach + device * piece.rows + piece.offsets[device]
    return padded[start : start + piece.count]


@pytest.mark.nightly
@settings(deadline=None)
@given(
    size=st.integers(4, 40), taps=st.sampled_from([1, 2, 3, 5, 7]), stride=st.integers(1, 3),
    dilation=st.integers(1, 2), base=st.integers(1, 3),
    low=st.integers(0, 4), high=st.integers(0, 4), ways=st.sampled_from([2, 3, 4, 8]),
)  # fmt: skip
@example(size=9, taps=3, stride=1, dilation=1, base=1, low=1, high=1, ways=4)  # the last piece has no row
@example(size=8, taps=3, stride=1, dilation=1, base=2, low=2, high=1, ways=4)  # a transposed convolution
def test_pieces_convolved_apart_are_the_whole_convolution(size, taps, stride, dilation, base, low, high, ways):
    if base > 1:
        stride = dilation = 1
    span = (taps - 1) * dilation + 1
    result = ((size - 1) * base + 1 + low + high - span) // stride + 1
    if result < 1:
        return
    image, kernel = np.arange(1.0, size + 1), np.arange(1.0, taps + 1)
    options = {"stride": stride, "base": base, "dilation": dilation}
    piece = split_window(
        Window(size=size, result=result, span=span, stride=stride, low=low, base=base), "height", ("height",), ways
    )
    parts = [
        convolve(rows_of(piece, device, image), kernel, padding=piece.padding, **options) for device in range(ways)
    ]
    whole = convolve(image, kernel, padding=(low, high), **options)
    np.testing.assert_allclose(np.concatenate(parts)[:result], whole, rtol=1e-6)


@pytest.mark.parametrize(
    ("taps", "stride", "halo"), [(1, 1, (0, 0)), (3, 1, (1, 1)), (7, 1, (3, 3)), (3, 2, (0, 1)), (2, 2, (0, 0))]
)
def test_a_halo_is_what_a_kernel_reaches_beyond_a_piece(taps, stride, halo):
    total = max(0, taps - stride)  # SAME, of a size that the stride divides
    window = Window(size=32, result=32 // stride, span=taps, stride=stride, low=total // 2, base=1)
    assert split_window(window, "height", ("height",), 4).halo == halo


# Traffic.


def collectives(step):
    """Counts of (kind, shape) of the collectives of a step."""
    text = next(iter(step.programs.values())).as_text()
    kinds = "all-gather|all-reduce|all-to-all|collective-permute|reduce-scatter"
    return Counter(re.findall(rf"= (\w+\[[\d,]*\])\S* ({kinds})(?:-start)?\(", text))


@pytest.mark.nightly
def test_neighbours_exchange_the_rows_of_a_halo_and_no_image_is_gathered():
    batch = images((2, 32, 32, 3), labels=(2, 32, 32))

    class Two(nnx.Module):
        def __init__(self, rngs):
            self.first = nnx.Conv(3, 8, (5, 5), rngs=rngs)
            self.second = nnx.Conv(8, 4, (3, 3), rngs=rngs)

        def __call__(self, images):
            return self.second(nnx.relu(self.first(images)))

    step = trained(Two, batch, jp.Parallel(height=8), steps=1)[2]
    moved = {entry: count for entry, count in collectives(step).items() if entry[1] != "all-reduce"}
    assert moved == {
        ("f32[2,2,32,3]", "collective-permute"): 2,  # of the first images: floor(5 / 2) rows from above and from below
        ("f32[2,1,32,8]", "collective-permute"): 4,  # of the second: forward rows, backward their gradients
    }


# What is refused, and what is said.


class Dense(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.layer = nnx.Linear(3, 4, rngs=rngs)

    def __call__(self, images):
        return self.layer(images.mean(axis=(1, 2)))


def test_a_model_without_convolutions_is_refused():
    batch = images((8, 32, 32, 3), labels=(8,))
    with pytest.raises(jp.JaxparError, match=r"height=8 splits no image of Dense"):
        trained(Dense, batch, jp.Parallel(height=8), steps=1)


@pytest.mark.slow
def test_images_of_fewer_rows_than_devices_are_refused():
    batch = images((8, 4, 4, 3), labels=(8, 4, 4))
    with pytest.raises(jp.JaxparError, match=r"at least 8 rows"):
        trained(Segmenter, batch, jp.Parallel(height=8), steps=1)


@pytest.mark.nightly
def test_a_convolution_of_fewer_rows_than_devices_runs_whole_and_the_step_says_so():
    batch = images((8, 16, 16, 3), labels=(8, 16, 16))
    one = trained(Segmenter, batch, jp.Parallel(), devices=jax.devices()[:1])
    result = trained(Segmenter, batch, jp.Parallel(height=8))
    assert_equal(result, one)
    assert any(
        "from 8 to 4 rows of height run whole on each of 8" in note for note in result[2].compiler.implementations
    )


@pytest.mark.parametrize(
    ("parallel", "message"),
    [
        (jp.Parallel(height=2, pipe=2, data=2), "height=2 with pipe=2"),
        (jp.Parallel(width=2, data=4, exchange=jp.Exchange("diloco")), "width=2 with exchange"),
        (jp.Parallel(height=8, rules={"width": "height"}), "rules split height and width over height"),
    ],
    ids=["pipeline", "exchange", "one axis for two dims"],
)
def test_declarations_are_refused(parallel, message):
    with pytest.raises(jp.JaxparError, match=rf"(?m){message}"):
        jp.compose(Segmenter, parallel)


def test_a_picture_shows_who_holds_which_piece_of_an_image():
    layout = jp.compose(Segmenter, jp.Parallel(data=2, height=2, width=2))
    assert "Who holds which piece of an image" in layout._repr_html_()
    card = image_card(layout.sizes)
    assert [[shard.devices for shard in row] for row in card.rows] == [[[0], [1]], [[2], [3]], [[4], [5]], [[6], [7]]]
    assert image_card({"data": 8, "fsdp": 1, "tensor": 1}) is None


@pytest.mark.nightly
def test_gradients_of_pieces_are_summed_in_float32(segmented):
    """A sum in bfloat16 of what `jax.shard_map` returns ends the process on CPUs."""
    batch, expected = segmented
    losses, _, _ = trained(Segmenter, batch, jp.Parallel(height=4, data=2), precision="bf16")
    np.testing.assert_allclose(losses, expected[0], rtol=0.02)
