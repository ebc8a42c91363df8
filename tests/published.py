"""Models as their users write them, after Flax's published examples, and small. None knows of jaxpar.

MnistCNN   nnx     convolutions, BatchNorm, dropout with a key of the call, a flattened head
Gemma      nnx     grouped-query attention, rotary positions, gated MLP, tied embedding
VAE        linen   draws noise with a key of the call; loss of two terms
Seq2seq    linen   LSTM encoder and decoder, scanned; masked tokens
ResNet     linen   layers handed down as partials; `train` as an argument; BatchNorm over the devices of a pmap
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

cross_entropy = optax.softmax_cross_entropy_with_integer_labels


class MnistCNN(nnx.Module):
    def __init__(self, *, rngs: nnx.Rngs):
        self.conv1 = nnx.Conv(1, 8, kernel_size=(3, 3), rngs=rngs)
        self.norm1 = nnx.BatchNorm(8, rngs=rngs)
        self.drop1 = nnx.Dropout(0.1)
        self.conv2 = nnx.Conv(8, 16, kernel_size=(3, 3), rngs=rngs)
        self.norm2 = nnx.BatchNorm(16, rngs=rngs)
        self.pool = partial(nnx.avg_pool, window_shape=(2, 2), strides=(2, 2))
        self.linear1 = nnx.Linear(64, 32, rngs=rngs)
        self.drop2 = nnx.Dropout(0.1)
        self.linear2 = nnx.Linear(32, 10, rngs=rngs)

    def __call__(self, image, rngs: nnx.Rngs | None = None):
        x = self.pool(nnx.relu(self.norm1(self.drop1(self.conv1(image), rngs=rngs))))
        x = self.pool(nnx.relu(self.norm2(self.conv2(x))))
        x = x.reshape(x.shape[0], -1)
        return self.linear2(nnx.relu(self.drop2(self.linear1(x), rngs=rngs)))


class RMSNorm(nnx.Module):
    def __init__(self, size: int):
        self.scale = nnx.Param(jnp.zeros(size))  # an offset from 1

    def __call__(self, x):
        variance = jnp.mean(jnp.square(x), axis=-1, keepdims=True)
        return x * jax.lax.rsqrt(variance + 1e-6) * (1 + self.scale)


class Einsum(nnx.Module):
    def __init__(self, equation: str, shape: tuple[int, ...], *, rngs: nnx.Rngs):
        self.equation = equation
        self.w = nnx.Param(0.1 * jax.random.normal(rngs.params(), shape))

    def __call__(self, x):
        return jnp.einsum(self.equation, x, self.w)


def rotate(x, positions):
    """Rotates pairs of channels of [batch, seq, heads, head_dim] by angles that grow with the position."""
    half = x.shape[-1] // 2
    angles = positions[:, None] / 10_000 ** (jnp.arange(half) / half)
    sin, cos = jnp.sin(angles)[:, None, :].astype(x.dtype), jnp.cos(angles)[:, None, :].astype(x.dtype)
    left, right = x[..., :half], x[..., half:]
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)


class Attention(nnx.Module):
    def __init__(self, embed: int, heads: int, kv_heads: int, head_dim: int, *, rngs: nnx.Rngs):
        self.groups = heads // kv_heads
        self.q_einsum = Einsum("btd,ndh->btnh", (heads, embed, head_dim), rngs=rngs)
        self.kv_einsum = Einsum("bsd,ckdh->cbskh", (2, kv_heads, embed, head_dim), rngs=rngs)
        self.out_einsum = Einsum("btnh,nhd->btd", (heads, head_dim, embed), rngs=rngs)

    def __call__(self, x):
        batch, length, _ = x.shape
        positions = jnp.arange(length)
        keys, values = self.kv_einsum(x)
        queries, keys = rotate(self.q_einsum(x), positions), rotate(keys, positions)
        queries = queries.reshape(batch, length, -1, self.groups, queries.shape[-1])
        scores = jnp.einsum("btkgh,bskh->bkgts", queries, keys) / keys.shape[-1] ** 0.5
        causal = positions[:, None] >= positions
        weights = jax.nn.softmax(jnp.where(causal, scores, -1e30), axis=-1)
        mixed = jnp.einsum("bkgts,bskh->btkgh", weights, values)
        return self.out_einsum(mixed.reshape(batch, length, -1, mixed.shape[-1]))


class GatedMLP(nnx.Module):
    def __init__(self, embed: int, hidden: int, *, rngs: nnx.Rngs):
        linear = partial(nnx.Linear, use_bias=False, rngs=rngs)
        self.gate_proj, self.up_proj = linear(embed, hidden), linear(embed, hidden)
        self.down_proj = linear(hidden, embed)

    def __call__(self, x):
        return self.down_proj(nnx.gelu(self.gate_proj(x)) * self.up_proj(x))


class Block(nnx.Module):
    def __init__(self, embed: int, *, rngs: nnx.Rngs):
        self.before_attention, self.before_mlp = RMSNorm(embed), RMSNorm(embed)
        self.attention = Attention(embed, heads=4, kv_heads=2, head_dim=8, rngs=rngs)
        self.mlp = GatedMLP(embed, 2 * embed, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.before_attention(x))
        return x + self.mlp(self.before_mlp(x))


class Gemma(nnx.Module):
    def __init__(self, vocab=32, embed=16, layers=2, softcap=30.0, *, rngs: nnx.Rngs):
        self.softcap = softcap
        self.input_embedding = nnx.Param(0.1 * jax.random.normal(rngs.params(), (vocab, embed)))
        self.blocks = nnx.List([Block(embed, rngs=rngs) for _ in range(layers)])
        self.final_norm = RMSNorm(embed)

    def __call__(self, tokens):
        x = self.input_embedding[tokens]
        x = x * jnp.sqrt(x.shape[-1]).astype(x.dtype)
        for block in self.blocks:
            x = block(x)
        logits = jnp.dot(self.final_norm(x), self.input_embedding.T)  # the same table reads and writes
        return self.softcap * jnp.tanh(logits / self.softcap)


class VAE(nn.Module):
    latents: int = 8

    def setup(self):
        self.hidden = nn.Dense(32)
        self.mean, self.log_variance = nn.Dense(self.latents), nn.Dense(self.latents)
        self.decoder = nn.Sequential([nn.Dense(32), nn.relu, nn.Dense(64)])

    def __call__(self, image, z_rng):
        hidden = nn.relu(self.hidden(image))
        mean, log_variance = self.mean(hidden), self.log_variance(hidden)
        noise = jax.random.normal(z_rng, mean.shape)
        return self.decoder(mean + jnp.exp(log_variance / 2) * noise), mean, log_variance

    def generate(self, latent):
        return nn.sigmoid(self.decoder(latent))


class DecoderCell(nn.RNNCellBase):
    features: int
    vocab: int

    @nn.compact
    def __call__(self, carry, x):
        carry, y = nn.OptimizedLSTMCell(self.features)(carry, x)
        logits = nn.Dense(self.vocab)(y)
        return carry, (logits, jax.random.categorical(self.make_rng("sample"), logits))

    @property
    def num_feature_axes(self) -> int:
        return 1


class Seq2seq(nn.Module):
    vocab: int = 16
    features: int = 32

    @nn.compact
    def __call__(self, source, target, lengths):
        embed = nn.Embed(self.vocab, self.features)
        encoder = nn.RNN(nn.LSTMCell(self.features), return_carry=True, name="encoder")
        cell = DecoderCell(self.features, self.vocab)
        decoder = nn.RNN(cell, split_rngs={"params": False, "sample": True}, name="decoder")
        carry, _ = encoder(embed(source), seq_lengths=lengths)
        return decoder(embed(target), initial_carry=carry)  # logits, and a token drawn from each


class ResNetBlock(nn.Module):
    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        y = nn.relu(self.norm()(self.conv(self.filters, (3, 3), self.strides)(x)))
        y = self.norm(scale_init=nn.initializers.zeros)(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    stages: tuple[int, ...] = (1, 1)
    filters: int = 8
    classes: int = 10
    dtype: Any = jnp.float32

    @nn.compact
    def __call__(self, x, train: bool = True):
        conv = partial(nn.Conv, use_bias=False, dtype=self.dtype)
        norm = partial(
            nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5, dtype=self.dtype, axis_name="batch"
        )
        x = nn.relu(norm(name="norm_init")(conv(self.filters, (3, 3), name="conv_init")(x)))
        x = nn.max_pool(x, (2, 2), strides=(2, 2))
        for i, blocks in enumerate(self.stages):
            for j in range(blocks):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                x = ResNetBlock(self.filters * 2**i, conv=conv, norm=norm, strides=strides)(x)
        return nn.Dense(self.classes, dtype=self.dtype)(jnp.mean(x, axis=(1, 2))).astype(self.dtype)


def digit_loss(model, batch):
    logits = model(batch["image"])
    losses, hits = cross_entropy(logits, batch["label"]), jnp.argmax(logits, axis=-1) == batch["label"]
    return {"loss": (losses.sum(), losses.size), "accuracy": (hits.sum(), hits.size)}


def language_loss(model, batch):
    losses = cross_entropy(model(batch["tokens"][:, :-1]), batch["tokens"][:, 1:])
    return losses.sum(), losses.size


def mnist_loss(model, batch, key):
    logits = model(batch["image"], nnx.Rngs(dropout=key))
    losses, hits = cross_entropy(logits, batch["label"]), jnp.argmax(logits, axis=-1) == batch["label"]
    return {"loss": (losses.sum(), losses.size), "accuracy": (hits.sum(), hits.size)}


def vae_loss(model, batch, z_rng):
    pixels = batch["image"].reshape(len(batch["image"]), -1)
    logits, mean, log_variance = model(pixels, z_rng)
    rebuilt = optax.sigmoid_binary_cross_entropy(logits, pixels).sum()
    divergence = -0.5 * jnp.sum(1 + log_variance - mean**2 - jnp.exp(log_variance))
    return {name: (x, len(pixels)) for name, x in [("loss", rebuilt + divergence), ("kl", divergence)]}


def translation_loss(model, batch):
    target = batch["target"]
    logits, _ = model(batch["source"], target[:, :-1], batch["length"])
    mask = target[:, 1:] != 0
    return (cross_entropy(logits, target[:, 1:]) * mask).sum(), mask.sum()


def image_loss(model, batch):
    logits = model(batch["image"], train=model.training)
    return cross_entropy(logits, batch["label"]).sum(), len(logits)
