"""AlexNet (Krizhevsky et al. 2012) in the single tower of Krizhevsky 2014 (arXiv:1404.5997), from Flax's own layers."""

import jax
from flax import nnx

from jaxpar.models.settings.convolutional import AlexNetConfig


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
        rows = _pool(_pool(_pool((s.size + 4 - 11) // 4 + 1)))
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


def _pool(rows: int) -> int:
    return (rows - 3) // 2 + 1
