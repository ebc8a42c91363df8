"""A residual network (He et al. 2015, arXiv:1512.03385) with BatchNorm, from Flax's own layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.settings.convolutional import ResNetConfig


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
