"""VGG (Simonyan and Zisserman 2014, arXiv:1409.1556), from Flax's own layers."""

import jax
from flax import nnx

from jaxpar.models.settings.convolutional import VGGConfig


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
