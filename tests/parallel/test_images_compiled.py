"""Images in pieces as compiled for GPUs that are absent: traffic as by theory, memory and FLOP of a device's share."""

from functools import partial

import jax
import jax.numpy as jnp
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.models.convolutional import UNet
from jaxpar.models.settings.classifiers import UNetConfig

pytest.importorskip("jax_plugins.xla_cuda13", reason="no compiler for absent GPUs: jax-cuda13-pjrt")
HALO = "halo along height"


class Chain(nnx.Module):
    """Convolutions one after another, at full resolution."""

    def __init__(self, kernels, channels, *, rngs):
        pairs = zip(channels, channels[1:], kernels, strict=False)
        self.layers = nnx.List([nnx.Conv(i, o, (k,) * 2, rngs=rngs) for i, o, k in pairs])

    def __call__(self, images):
        for layer in self.layers:
            images = nnx.relu(layer(images))
        return images


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"])
    return losses.sum(), losses.size


def report(model, parallel, batch=4, size=256, channels=3, dims=2):
    layout = jp.compose(model, parallel, jp.target_devices("h100:1x8"))
    shape = (batch, *(size,) * dims)
    arrays = {
        "images": jax.ShapeDtypeStruct((*shape, channels), jnp.float32),
        "labels": jax.ShapeDtypeStruct(shape, jnp.int32),
    }
    return jp.inspect(jp.train_step(layout, loss, optax.sgd(0.1)), arrays)


@pytest.mark.slow
def test_halos_are_the_rows_that_kernels_reach_and_no_image_is_gathered():
    kernels, channels, batch, size = (5, 3, 1, 7), (3, 8, 16, 16, 4), 4, 256
    ledger = report(partial(Chain, kernels, channels), jp.Parallel(height=8)).ledger
    halos = [entry for entry in ledger if entry.cause == HALO]
    sent = {
        backward: sum(entry.payload * entry.times for entry in halos if entry.backward is backward)
        for backward in (False, True)
    }
    row = [2 * (kernel // 2) * size * width * batch * 4 for kernel, width in zip(kernels, channels, strict=False)]
    assert sent[False] == sum(row)
    assert sent[True] == sum(row[1:])  # the first images have no gradient
    assert {entry.axes for entry in halos} == {("height",)}
    others = {entry.kind for entry in ledger if entry not in halos}
    assert others == {"all-reduce"}
    gradients = [entry for entry in ledger if entry.kind == "all-reduce" and "kernel" in entry.cause]
    assert len(gradients) == len(kernels)


class Upsampled(nnx.Module):
    """The two ways in which U-Nets without transposed convolutions grow an image."""

    def __init__(self, *, rngs):
        self.down = nnx.Conv(3, 16, (3, 3), strides=4, rngs=rngs)
        self.middle = nnx.Conv(16, 16, (3, 3), rngs=rngs)
        self.head = nnx.Conv(16, 4, (3, 3), rngs=rngs)

    def __call__(self, images):
        x = nnx.relu(self.down(images))
        x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
        x = nnx.relu(self.middle(x))
        return self.head(jax.image.resize(x, (*images.shape[:-1], 16), "bilinear"))


@pytest.mark.nightly
def test_images_that_are_resized_exchange_the_rows_of_an_interpolation():
    ledger = report(Upsampled, jp.Parallel(height=8)).ledger
    assert {entry.kind for entry in ledger if entry.cause != HALO} == {"all-reduce"}
    row = [128 * 16, 128 * 16, 256 * 16]  # of a convolution, of the resize and of a convolution: one to each side
    sent = sum(entry.payload * entry.times for entry in ledger if entry.cause == HALO and not entry.backward)
    assert sent == 2 * sum(row) * 4 * 4


@pytest.mark.nightly
def test_a_device_computes_and_stores_its_piece():
    model = partial(Chain, (3,) * 8, (16, *(32,) * 8))
    one = report(model, jp.Parallel(data=8), batch=8, size=512, channels=16)
    cut = report(model, jp.Parallel(height=8), batch=8, size=512, channels=16)
    assert cut.flop.forward + cut.flop.backward <= 1.02 * (one.flop.forward + one.flop.backward)
    assert cut.total <= 1.05 * one.total + 8 * 2 * 512 * 32 * 8 * 4  # and halos: two rows for each layer


@pytest.mark.full
def test_a_volume_that_fits_no_gpu_fits_eight():
    """A 3-D U-Net on 512^3 voxels in bf16; a device's share is what it needs for a volume of an eighth of the rows."""

    def fit(parallel, devices, width, *sizes):
        model = partial(UNet, UNetConfig(dims=3, classes=3, width=width, levels=4))
        layout = jp.compose(model, parallel, jp.target_devices("h100:1x8")[:devices])
        step = jp.train_step(layout, volume_loss, optax.adamw(1e-3), precision="bf16")
        arrays = {name: jax.ShapeDtypeStruct(sizes, dtype) for name, dtype in VOLUME.items()}
        return jp.inspect(step, arrays)

    assert not fit(jp.Parallel(), 1, 32, 1, 512, 512, 512).fits
    assert fit(jp.Parallel(height=8), 8, 32, 1, 512, 512, 512).fits
    cut = fit(jp.Parallel(height=8), 8, 16, 1, 512, 512, 512)
    share = fit(jp.Parallel(data=8), 8, 16, 8, 64, 512, 512)
    assert cut.total <= 1.05 * share.total
    assert cut.flop.forward + cut.flop.backward <= 1.02 * (share.flop.forward + share.flop.backward)


VOLUME = {"inputs": jnp.float32, "labels": jnp.int32}


def volume_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"])
    return losses.sum(), jnp.float32(losses.size)
