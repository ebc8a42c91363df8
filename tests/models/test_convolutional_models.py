"""The reference models for images: sizes as published, and training in pieces as Flax alone on one device."""

import math
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from plain_loop import assert_alike, steps, train

import jaxpar as jp
from jaxpar.models.convolutional import VGG, AlexNet, GoogLeNet, ResNet, UNet
from jaxpar.models.settings.classifiers import AlexNetConfig, GoogLeNetConfig, ResNetConfig, UNetConfig, VGGConfig

RESNET_50 = ResNetConfig(channels=3, classes=1000, blocks=(3, 4, 6, 3), width=64, bottleneck=True, stem="large")
OPTIMIZER = optax.sgd(0.05)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "parameters"),
    [
        (partial(AlexNet, AlexNetConfig()), 61_100_840),
        (partial(VGG, VGGConfig()), 138_357_544),
        # 6.8 M in the paper's table, which counts in units of 1,024 and leaves biases out
        (partial(GoogLeNet, GoogLeNetConfig()), 6_998_552),
        (partial(ResNet, RESNET_50), 25_557_032),
        (partial(UNet, UNetConfig(levels=5, width=64)), 31_036_546),
    ],
    ids=["AlexNet", "VGG-16", "GoogLeNet", "ResNet-50", "U-Net"],
)
def test_models_have_their_published_sizes(model, parameters):
    abstract = nnx.eval_shape(lambda: model(rngs=nnx.Rngs(0)))
    assert sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(nnx.state(abstract, nnx.Param))) == parameters


@pytest.mark.slow
def test_googlenet_has_22_layers():
    """Along its longest path: three of the stem, two in each of nine inceptions, and the classifier."""
    model = nnx.eval_shape(lambda: GoogLeNet(GoogLeNetConfig(), rngs=nnx.Rngs(0)))
    assert 3 + 2 * len(model.blocks) + 1 == 22


def loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["labels"])
    return losses.sum(), losses.size


def batch_of(shape, labels, classes=3):
    numbers = np.random.default_rng(0)
    return {
        "inputs": numbers.normal(size=shape).astype(np.float32),
        "labels": numbers.integers(0, classes, labels).astype(np.int32),
    }


SMALL = {
    "ResNet": (partial(ResNet, ResNetConfig(classes=3, blocks=(1, 1), width=4)), (8, 16, 16, 1), (8,)),
    "ResNet of bottlenecks": (
        partial(ResNet, ResNetConfig(channels=3, classes=3, blocks=(1, 1), width=4, bottleneck=True, stem="large")),
        (8, 32, 32, 3), (8,),
    ),
    "U-Net": (partial(UNet, UNetConfig(classes=3, width=4, groups=2)), (4, 32, 32), (4, 32, 32)),
    "U-Net of volumes": (
        partial(UNet, UNetConfig(classes=3, width=4, dims=3, levels=2)), (4, 16, 16, 8), (4, 16, 16, 8)
    ),
    "VGG": (
        partial(VGG, VGGConfig(size=16, channels=1, classes=3, blocks=(1, 1), width=4, hidden=16, dropout=0.0)),
        (8, 16, 16, 1), (8,),
    ),
    "AlexNet": (
        partial(AlexNet, AlexNetConfig(size=64, channels=1, classes=3, width=4, hidden=16, dropout=0.0)),
        (8, 64, 64, 1), (8,),
    ),
    "GoogLeNet": (
        partial(GoogLeNet, GoogLeNetConfig(channels=1, classes=3, width=4, dropout=0.0)), (8, 32, 32, 1), (8,)
    ),
}  # fmt: skip


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.xdist_group(name)) for name in SMALL])
@pytest.mark.parametrize(
    "sizes",
    [
        {"height": 4, "data": 2},
        pytest.param({"height": 2, "tensor": 2, "fsdp": 2}, marks=pytest.mark.slow),
        pytest.param({"tensor": 4, "data": 2}, marks=pytest.mark.slow),
    ],
    ids=lambda sizes: " x ".join(f"{axis} {size}" for axis, size in sizes.items()),
)
@pytest.mark.filterwarnings("ignore:.*times its share:UserWarning")  # pieces of few rows, and few channels
def test_models_train_in_pieces_as_whole_on_one_device(name, sizes):
    model, inputs, labels = SMALL[name]
    batch = batch_of(inputs, labels)
    expected = train(model, model_of_rngs(model), loss, OPTIMIZER, batch)
    layout = jp.compose(model, jp.Parallel(**sizes))
    assert_alike(steps(layout, loss, OPTIMIZER, batch), expected)


def model_of_rngs(model):
    return lambda rngs: model(rngs=rngs)


@pytest.mark.slow
def test_images_that_levels_do_not_halve_are_refused():
    model = UNet(UNetConfig(levels=3), rngs=nnx.Rngs(0))
    with pytest.raises(jp.JaxparError, match=r"30 x 32 in a U-Net of 3 levels(.|\n)*images of 32 x 32"):
        model(jnp.zeros((1, 30, 32)))
