"""U-Net for images (Ronneberger et al. 2015, arXiv:1505.04597) and volumes (Cicek et al. 2016, arXiv:1606.06650).

    full resolution   two convolutions ────────── skip connection ─────────► two convolutions ─► classes of each pixel
    half              └─ two convolutions ─────── skip connection ──► two convolutions ─┘
    quarter              └───────────── two convolutions ─────────────┘

Images are padded, so that a result has the size of its image; a level ends by pooling, and begins again by a transposed
convolution of stride 2. All layers are Flax's own.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.errors import refuse
from jaxpar.models.settings.convolutional import UNetConfig


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
