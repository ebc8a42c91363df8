"""Convolutional networks for images and volumes, from Flax's own layers.

AlexNet     Krizhevsky et al. 2012, in the single tower of Krizhevsky 2014 (arXiv:1404.5997)
VGG         Simonyan and Zisserman 2014, arXiv:1409.1556
GoogLeNet   Szegedy et al. 2014, arXiv:1409.4842, without its auxiliary classifiers
ResNet      He et al. 2015, arXiv:1512.03385, with BatchNorm
UNet        Ronneberger et al. 2015, arXiv:1505.04597; of volumes Cicek et al. 2016, arXiv:1606.06650
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.settings.classifiers import AlexNetConfig, GoogLeNetConfig, ResNetConfig, UNetConfig, VGGConfig

# GoogLeNet, table 1: channels of 1x1, of 3x3's reduction and 3x3, of 5x5's reduction and 5x5, of the pooled branch
INCEPTIONS = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip
POOLED_AFTER = (1, 6)  # inception 3b and 4e


class AlexNet(nnx.Module):
    """Images to logits of classes: five convolutions, then three dense layers with 96 % of the parameters."""

    def __init__(self, settings: AlexNetConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        widths = [s.width, s.width * 3, s.width * 6, s.width * 4, s.width * 4]
        shapes = [((11, 11), 4, 2), ((5, 5), 1, 2), ((3, 3), 1, 1), ((3, 3), 1, 1), ((3, 3), 1, 1)]
        layers, inputs = [], s.channels
        for outputs, (kernel, stride, padding) in zip(widths, shapes, strict=True):
            layers.append(nnx.Conv(inputs, outputs, kernel, strides=stride, padding=padding, rngs=rngs))
            inputs = outputs
        self.convolutions = nnx.List(layers)
        rows = _pooled_rows(_pooled_rows(_pooled_rows((s.size + 4 - 11) // 4 + 1)))
        self.first = nnx.Linear(rows * rows * inputs, s.hidden, rngs=rngs)
        self.second = nnx.Linear(s.hidden, s.hidden, rngs=rngs)
        self.head = nnx.Linear(s.hidden, s.classes, rngs=rngs)
        self.dropout = nnx.Dropout(s.dropout, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        x = images
        for index, layer in enumerate(self.convolutions):
            x = nnx.relu(layer(x))
            if index in (0, 1, 4):
                x = nnx.max_pool(x, (3, 3), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = nnx.relu(self.first(self.dropout(x)))
        x = nnx.relu(self.second(self.dropout(x)))
        return self.head(x)


def _pooled_rows(rows: int) -> int:
    return (rows - 3) // 2 + 1


class VGG(nnx.Module):
    """Images to logits of classes: stages of 3x3 convolutions, then three dense layers."""

    def __init__(self, settings: VGGConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        stages, inputs = [], s.channels
        for stage, count in enumerate(s.blocks):
            outputs, layers = s.width * min(2**stage, 8), []
            for _ in range(count):
                layers.append(nnx.Conv(inputs, outputs, (3, 3), rngs=rngs))
                inputs = outputs
            stages.append(nnx.List(layers))
        self.stages = nnx.List(stages)
        rows = s.size // 2 ** len(s.blocks)
        self.first = nnx.Linear(rows * rows * inputs, s.hidden, rngs=rngs)
        self.second = nnx.Linear(s.hidden, s.hidden, rngs=rngs)
        self.head = nnx.Linear(s.hidden, s.classes, rngs=rngs)
        self.dropout = nnx.Dropout(s.dropout, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        x = images
        for stage in self.stages:
            for layer in stage:
                x = nnx.relu(layer(x))
            x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        x = self.dropout(nnx.relu(self.first(x)))
        x = self.dropout(nnx.relu(self.second(x)))
        return self.head(x)


class Inception(nnx.Module):
    """Four parallel branches, joined along channels."""

    def __init__(self, inputs: int, widths: tuple[int, ...], *, rngs: nnx.Rngs):
        one, reduce3, three, reduce5, five, pooled = widths
        self.one = nnx.Conv(inputs, one, (1, 1), rngs=rngs)
        self.reduce3 = nnx.Conv(inputs, reduce3, (1, 1), rngs=rngs)
        self.three = nnx.Conv(reduce3, three, (3, 3), rngs=rngs)
        self.reduce5 = nnx.Conv(inputs, reduce5, (1, 1), rngs=rngs)
        self.five = nnx.Conv(reduce5, five, (5, 5), rngs=rngs)
        self.pooled = nnx.Conv(inputs, pooled, (1, 1), rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Output [batch, height, width, the sum of the branches' channels]."""
        three = self.three(nnx.relu(self.reduce3(x)))
        five = self.five(nnx.relu(self.reduce5(x)))
        pooled = self.pooled(nnx.max_pool(x, (3, 3), strides=(1, 1), padding="SAME"))
        return nnx.relu(jnp.concatenate([self.one(x), three, five, pooled], axis=-1))


class GoogLeNet(nnx.Module):
    """Images to logits of classes."""

    def __init__(self, settings: GoogLeNetConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.stem = nnx.Conv(s.channels, s.width, (7, 7), strides=2, rngs=rngs)
        self.reduce = nnx.Conv(s.width, s.width, (1, 1), rngs=rngs)
        self.wide = nnx.Conv(s.width, 3 * s.width, (3, 3), rngs=rngs)
        blocks, inputs = [], 3 * s.width
        for row in INCEPTIONS:
            widths = tuple(max(1, channels * s.width // 64) for channels in row)
            blocks.append(Inception(inputs, widths, rngs=rngs))
            inputs = widths[0] + widths[2] + widths[4] + widths[5]
        self.blocks = nnx.List(blocks)
        self.dropout = nnx.Dropout(s.dropout, rngs=rngs)
        self.head = nnx.Linear(inputs, s.classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width, channels]."""
        x = _pool(nnx.relu(self.stem(images)))
        x = _pool(nnx.relu(self.wide(nnx.relu(self.reduce(x)))))
        for index, block in enumerate(self.blocks):
            x = block(x)
            x = _pool(x) if index in POOLED_AFTER else x
        return self.head(self.dropout(jnp.mean(x, axis=(1, 2))))


def _pool(x: jax.Array) -> jax.Array:
    return nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")


class ResidualBlock(nnx.Module):
    """Two 3x3 convolutions and a shortcut; BatchNorm's statistics are those of the global batch."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(outputs, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(outputs, rngs=rngs)
        shape_changes = stride != 1 or inputs != outputs
        self.short = (
            nnx.Conv(inputs, outputs, (1, 1), strides=stride, use_bias=False, rngs=rngs) if shape_changes else None
        )

    def __call__(self, x: jax.Array) -> jax.Array:
        """Output [batch, height / stride, width / stride, outputs]."""
        y = self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x)))))
        return nnx.relu(y + (x if self.short is None else self.short(x)))


class Bottleneck(nnx.Module):
    """A 1x1, a 3x3 and a 1x1 convolution and a shortcut; the first two have a quarter of the channels."""

    def __init__(self, inputs: int, outputs: int, *, stride: int, rngs: nnx.Rngs):
        inner = outputs // 4
        self.conv1 = nnx.Conv(inputs, inner, (1, 1), use_bias=False, rngs=rngs)
        self.norm1 = nnx.BatchNorm(inner, rngs=rngs)
        self.conv2 = nnx.Conv(inner, inner, (3, 3), strides=stride, use_bias=False, rngs=rngs)
        self.norm2 = nnx.BatchNorm(inner, rngs=rngs)
        self.conv3 = nnx.Conv(inner, outputs, (1, 1), use_bias=False, rngs=rngs)
        self.norm3 = nnx.BatchNorm(outputs, rngs=rngs)
        shape_changes = stride != 1 or inputs != outputs
        self.short = (
            nnx.Conv(inputs, outputs, (1, 1), strides=stride, use_bias=False, rngs=rngs) if shape_changes else None
        )
        self.short_norm = nnx.BatchNorm(outputs, rngs=rngs) if shape_changes else None

    def __call__(self, x: jax.Array) -> jax.Array:
        """Output [batch, height / stride, width / stride, outputs]."""
        y = nnx.relu(self.norm1(self.conv1(x)))
        y = self.norm3(self.conv3(nnx.relu(self.norm2(self.conv2(y)))))
        return nnx.relu(y + (x if self.short is None or self.short_norm is None else self.short_norm(self.short(x))))


class ResNet(nnx.Module):
    """Images to logits of classes."""

    def __init__(self, settings: ResNetConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        kernel, stride = ((7, 7), 2) if s.stem == "large" else ((3, 3), 1)
        self.first = nnx.Conv(s.channels, s.width, kernel, strides=stride, use_bias=False, rngs=rngs)
        self.norm = nnx.BatchNorm(s.width, rngs=rngs)
        blocks, inputs = [], s.width
        for stage, count in enumerate(s.blocks):
            for i in range(count):
                outputs, stride = s.width * 2**stage * (4 if s.bottleneck else 1), 2 if stage and not i else 1
                kind = Bottleneck if s.bottleneck else ResidualBlock
                blocks.append(kind(inputs, outputs, stride=stride, rngs=rngs))
                inputs = outputs
        self.blocks = nnx.List(blocks)
        self.head = nnx.Linear(inputs, s.classes, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width] or [batch, height, width, channels]."""
        x = images if images.ndim == 4 else images[..., None]
        x = nnx.relu(self.norm(self.first(x)))
        if self.settings.stem == "large":
            x = nnx.max_pool(x, (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


class TwoConvolutions(nnx.Module):
    """Two convolutions, each with a norm and a ReLU."""

    def __init__(self, settings: UNetConfig, inputs: int, outputs: int, *, rngs: nnx.Rngs):
        kernel = (3,) * settings.dims

        def norm() -> nnx.Module:
            groups = settings.groups
            return nnx.GroupNorm(outputs, groups, rngs=rngs) if groups else nnx.BatchNorm(outputs, rngs=rngs)

        self.conv1 = nnx.Conv(inputs, outputs, kernel, use_bias=False, rngs=rngs)
        self.norm1 = norm()
        self.conv2 = nnx.Conv(outputs, outputs, kernel, use_bias=False, rngs=rngs)
        self.norm2 = norm()

    def __call__(self, x: jax.Array) -> jax.Array:
        """Output [batch, ..., outputs] of the image's size."""
        return nnx.relu(self.norm2(self.conv2(nnx.relu(self.norm1(self.conv1(x))))))


class UNet(nnx.Module):
    """Images or volumes to logits of the classes of each pixel."""

    def __init__(self, settings: UNetConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        widths = [s.width * 2**level for level in range(s.levels)]
        pairs = list(zip([s.channels, *widths], widths, strict=False))
        self.down = nnx.List([TwoConvolutions(s, *pair, rngs=rngs) for pair in pairs])
        size = (2,) * s.dims
        self.grow = nnx.List([nnx.ConvTranspose(2 * w, w, size, strides=size, rngs=rngs) for w in widths[:-1]])
        self.up = nnx.List([TwoConvolutions(s, 2 * w, w, rngs=rngs) for w in widths[:-1]])
        self.head = nnx.Conv(s.width, s.classes, (1,) * s.dims, rngs=rngs)

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, ..., classes] of images [batch, ..., channels], or [batch, ...] of one channel.

        Raises:
          JaxparError: If the levels do not divide the image.
        """
        s = self.settings
        x = images if images.ndim == s.dims + 2 else images[..., None]
        factor, sizes = 2 ** (s.levels - 1), x.shape[1:-1]
        if any(size % factor for size in sizes):
            raise refuse(
                f"images of {' x '.join(map(str, sizes))} in a U-Net of {s.levels} levels",
                rule=f"each level halves the image, so {factor} divides its sizes",
                fix=f"images of {' x '.join(str(-(-size // factor) * factor) for size in sizes)}, or fewer levels",
            )
        skips = []
        for level, block in enumerate(self.down):
            x = block(x)
            if level < s.levels - 1:
                skips.append(x)
                x = nnx.max_pool(x, (2,) * s.dims, strides=(2,) * s.dims)
        for grow, block, skip in [*zip(self.grow, self.up, skips, strict=True)][::-1]:
            x = block(jnp.concatenate([skip, grow(x)], axis=-1))
        return self.head(x)
