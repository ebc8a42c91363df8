"""Classifiers with named dims: a vision transformer, and a multilayer perceptron.

ViT is Dosovitskiy et al. 2020, arXiv:2010.11929, with the mean of all patches as the image. The perceptron is the
smallest model with a pair of column- and row-sharded matrices.
"""

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.dim_names import constrain
from jaxpar.models.layer_stack import run_stack, stack
from jaxpar.models.layers import Block, BlockConfig, LayerKind, Norm, dropout, weight
from jaxpar.models.settings.classifiers import MLPConfig, ViTConfig


class ViT(nnx.Module):
    """Images to logits of classes."""

    def __init__(self, settings: ViTConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.remat = "none"
        self.deterministic = False
        pixels, patches = s.patch * s.patch * s.channels, (s.size // s.patch) ** 2
        self.patch = weight(rngs, (pixels, s.dim), ("pixels", "embed"), pixels**-0.5)
        self.patch_bias = nnx.Param(jnp.zeros((s.dim,)), out_sharding=("embed",))
        self.positions = weight(rngs, (patches, s.dim), ("patches", "embed"), 0.02)

        kind = BlockConfig(
            dim=s.dim,
            heads=s.heads,
            kv_heads=s.heads,
            hidden=s.hidden or 4 * s.dim,
            norm="layer",
            gated=False,
            biases=("qkv", "out", "mlp"),
            causal=False,
            dropout=s.dropout,
            out_scale=(2 * s.layers) ** -0.5,
        )
        self.blocks = stack(lambda rngs: Block(kind, rngs=rngs), s.layers, rngs)
        self.norm = Norm(s.dim, kind="layer")
        self.head = weight(rngs, (s.dim, s.classes), ("embed", "classes"), s.dim**-0.5)
        self.head_bias = nnx.Param(jnp.zeros((s.classes,)), out_sharding=("classes",))
        self.rngs = nnx.Rngs(dropout=rngs.dropout()) if s.dropout else None

    def __call__(self, images: jax.Array) -> jax.Array:
        """Logits [batch, classes] of images [batch, height, width] or [batch, height, width, channels]."""
        s = self.settings
        n = s.size // s.patch
        # patches line by line, the pixels of each patch contiguous: a convolution of stride `patch` as one matmul
        x = images.reshape(images.shape[0], n, s.patch, n, s.patch, s.channels)
        x = x.transpose(0, 1, 3, 2, 4, 5).reshape(images.shape[0], n * n, -1)
        table = self.patch[...]
        x = jnp.einsum("bsp,pd->bsd", x.astype(table.dtype), table) + self.patch_bias[...] + self.positions[...]
        x = constrain(x, "batch", "seq", "embed")
        keys = None
        if self.rngs is not None and not self.deterministic:
            keys = jax.random.split(self.rngs.dropout(), s.layers + 1)
            x, keys = dropout(x, s.dropout, keys[0]), keys[1:]
        x = run_stack(self.blocks, x, keys, policy=self.remat, scan=s.scan, kinds=(LayerKind(),))
        return jnp.mean(self.norm(x), axis=1) @ self.head[...] + self.head_bias[...]


class MLP(nnx.Module):
    """Arrays to logits of classes."""

    def __init__(self, settings: MLPConfig, *, rngs: nnx.Rngs):
        s = self.settings = settings
        self.first = weight(rngs, (s.inputs, s.dim), ("inputs", "embed"), s.inputs**-0.5)
        self.up = nnx.List([weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), s.dim**-0.5) for _ in range(s.layers)])
        self.down = nnx.List(
            [weight(rngs, (s.hidden, s.dim), ("mlp", "embed"), s.hidden**-0.5) for _ in range(s.layers)]
        )
        self.head = weight(rngs, (s.dim, s.classes), ("embed", "classes"), s.dim**-0.5)
        self.head_bias = nnx.Param(jnp.zeros((s.classes,)), out_sharding=("classes",))

    def __call__(self, inputs: jax.Array) -> jax.Array:
        """Logits [batch, classes] of inputs [batch, ...]."""
        first = self.first[...]
        x = inputs.reshape(inputs.shape[0], -1).astype(first.dtype) @ first
        for up, down in zip(self.up, self.down, strict=True):
            hidden = constrain(jax.nn.relu(x @ up[...]), "batch", "mlp")
            x = x + hidden @ down[...]
        return x @ self.head[...] + self.head_bias[...]
