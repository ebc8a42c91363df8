"""GoogLeNet (Szegedy et al. 2014, arXiv:1409.4842) without its auxiliary classifiers, from Flax's own layers."""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.settings.convolutional import GoogLeNetConfig

# Table 1 of the paper: channels of 1x1, of 3x3's reduction and 3x3, of 5x5's reduction and 5x5, of the pooled branch
INCEPTIONS = (
    (64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64),
    (192, 96, 208, 16, 48, 64), (160, 112, 224, 24, 64, 64), (128, 128, 256, 24, 64, 64), (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
    (256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128),
)  # fmt: skip
POOLED_AFTER = (1, 6)  # inception 3b and 4e


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
