"""Models that were written after the rules of `jaxpar.plan.model` stood: a check of the estimate on other programs."""

from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from flax import nnx

import jaxpar as jp

from .plain_models import BF16, Case, classify, cross_entropy, floats, gpt, ids


class Encoder(nn.Module):
    """A bidirectional encoder in Linen, with RMSNorm and SwiGLU."""

    layers: int
    dim: int
    heads: int
    vocab: int

    @nn.compact
    def __call__(self, tokens):
        dense = partial(nn.Dense, use_bias=False, dtype=BF16)
        x = nn.Embed(self.vocab, self.dim, dtype=BF16)(tokens)
        for _ in range(self.layers):
            y = nn.RMSNorm(dtype=BF16)(x)
            x = x + nn.MultiHeadDotProductAttention(num_heads=self.heads, dtype=BF16, use_bias=False)(y)
            y = nn.RMSNorm(dtype=BF16)(x)
            x = x + dense(self.dim)(nn.silu(dense(3 * self.dim)(y)) * dense(3 * self.dim)(y))
        return dense(self.vocab)(nn.RMSNorm(dtype=BF16)(x))


def encoder(*, rows=16, seq=256, layers=4, dim=512, heads=8, vocab=16384) -> Case:
    """A masked language model."""
    loss = lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"])  # noqa: E731
    module = Encoder(layers=layers, dim=dim, heads=heads, vocab=vocab)
    model = jp.from_linen(module, np.zeros((1, seq), np.int32))
    return model, loss, {"inputs": ids(rows, seq), "targets": ids(rows, seq)}


class ConvNet(nnx.Module):
    """Convolutions, max pooling and wide matmuls, in the manner of AlexNet."""

    def __init__(self, *, side, classes=1000, rngs):
        conv = partial(nnx.Conv, dtype=BF16, rngs=rngs)
        self.layers = nnx.List(
            [conv(3, 64, (7, 7), strides=2), conv(64, 192, (5, 5)), conv(192, 384, (3, 3)), conv(384, 256, (3, 3))]
        )
        self.one = nnx.Linear(256 * (side // 16) ** 2, 2048, dtype=BF16, rngs=rngs)
        self.two = nnx.Linear(2048, classes, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        for number, layer in enumerate(self.layers):
            x = nnx.relu(layer(x))
            if number != 2:
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        return self.two(nnx.relu(self.one(x.reshape(x.shape[0], -1))))


def convnet(*, rows=128, side=128) -> Case:
    """A classifier of images."""
    return partial(ConvNet, side=side), classify, {"inputs": floats(rows, side, side, 3), "labels": ids(rows)}


class WaveNet(nnx.Module):
    """Dilated causal convolutions over time, with gates and skips."""

    def __init__(self, *, dim, depth, classes, rngs):
        self.embed = nnx.Embed(classes, dim, dtype=BF16, rngs=rngs)
        conv = partial(nnx.Conv, dtype=BF16, rngs=rngs)
        self.gates = nnx.List([conv(dim, 2 * dim, (2,), kernel_dilation=2**i, padding="CAUSAL") for i in range(depth)])
        self.mixes = nnx.List([nnx.Linear(dim, dim, dtype=BF16, rngs=rngs) for _ in range(depth)])
        self.out = nnx.Linear(dim, classes, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        x, skips = self.embed(x), 0
        for gate, mix in zip(self.gates, self.mixes, strict=True):
            left, right = jnp.split(gate(x), 2, axis=-1)
            y = mix(jnp.tanh(left) * jax.nn.sigmoid(right))
            x, skips = x + y, skips + y
        return self.out(nnx.relu(skips))


def wavenet(*, rows=16, seq=2048, dim=256, depth=6, classes=256) -> Case:
    """A model of sound, sample by sample."""
    loss = lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"])  # noqa: E731
    model = partial(WaveNet, dim=dim, depth=depth, classes=classes)
    return model, loss, {"inputs": ids(rows, seq), "targets": ids(rows, seq)}


UNSEEN: dict[str, Callable[[], Case]] = {
    "GQA decoder": partial(gpt, rows=4, seq=1024, layers=3, dim=768, heads=12, kv_heads=4, vocab=32768),
    "Linen encoder": encoder,
    "convnet": convnet,
    "WaveNet": wavenet,
}
