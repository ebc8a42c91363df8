"""Classifiers of images, as their authors write them, and small. None knows of jaxpar.

MnistCNN   nnx     Flax's first tutorial: BatchNorm, dropout with `rngs` in the call
ConvNeXt   nnx     depthwise convolutions, scaled branches that are dropped by a key of the call
ResNet     linen   Flax's ImageNet: layers handed down as partials, BatchNorm over the devices of a pmap
ViT        linen   big_vision's: activations in names of its own, positions computed, a head that attends
Mixer      linen   MLPs over patches and over channels in turn, by transposing
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import linen as nn
from flax import nnx

from published.example import Example, cross_entropy, image, image_loss, images


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


def mnist_loss(model, batch, key):
    logits = model(batch["image"], nnx.Rngs(dropout=key))
    losses, hits = cross_entropy(logits, batch["label"]), jnp.argmax(logits, axis=-1) == batch["label"]
    return {"loss": (losses.sum(), losses.size), "accuracy": (hits.sum(), hits.size)}


class DropPath(nnx.Module):
    """Leaves whole branches out, each example its own."""

    def __init__(self, rate: float):
        self.rate = rate

    def __call__(self, x, *, rngs: nnx.Rngs):
        keep = jax.random.bernoulli(rngs.dropout(), 1 - self.rate, (x.shape[0], 1, 1, 1))
        return jnp.where(keep, x / (1 - self.rate), 0.0)


class ConvNeXtBlock(nnx.Module):
    def __init__(self, dim: int, rate: float, *, rngs: nnx.Rngs):
        self.dwconv = nnx.Conv(dim, dim, kernel_size=(3, 3), feature_group_count=dim, rngs=rngs)
        self.norm = nnx.LayerNorm(dim, epsilon=1e-6, rngs=rngs)
        self.pwconv1, self.pwconv2 = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)
        self.gamma = nnx.Param(0.1 * jnp.ones(dim))
        self.drop_path = DropPath(rate)

    def __call__(self, x, *, rngs: nnx.Rngs):
        y = self.pwconv2(nnx.gelu(self.pwconv1(self.norm(self.dwconv(x)))))
        return x + self.drop_path(self.gamma * y, rngs=rngs)


class ConvNeXt(nnx.Module):
    def __init__(self, dims=(8, 16), classes=10, *, rngs: nnx.Rngs):
        self.stem = nnx.Conv(1, dims[0], kernel_size=(2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
        self.down = nnx.Conv(dims[0], dims[1], kernel_size=(2, 2), strides=(2, 2), padding="VALID", rngs=rngs)
        self.stages = nnx.List([ConvNeXtBlock(dim, 0.1 * (i + 1), rngs=rngs) for i, dim in enumerate(dims)])
        self.norm, self.head = nnx.LayerNorm(dims[-1], rngs=rngs), nnx.Linear(dims[-1], classes, rngs=rngs)

    def __call__(self, x, *, rngs: nnx.Rngs):
        x = self.stages[0](self.stem(x), rngs=rngs)
        x = self.stages[1](self.down(x), rngs=rngs)
        return self.head(self.norm(x.mean(axis=(1, 2))))


def convnext_loss(model, batch, key):
    logits = model(batch["image"], rngs=nnx.Rngs(dropout=key))
    labels = optax.smooth_labels(jax.nn.one_hot(batch["label"], 10), 0.1)
    return optax.softmax_cross_entropy(logits, labels).sum(), len(logits)


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


def sincos2d(height, width, dim):
    """Returns positions [1, height x width, dim] of sines and cosines."""
    y, x = jnp.mgrid[:height, :width]
    omega = 1.0 / 10_000 ** (jnp.arange(dim // 4) / (dim // 4 - 1))
    y, x = jnp.einsum("m,d->md", y.flatten(), omega), jnp.einsum("m,d->md", x.flatten(), omega)
    return jnp.concatenate([jnp.sin(x), jnp.cos(x), jnp.sin(y), jnp.cos(y)], axis=1)[None]


class ViTMlp(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        inits = dict(kernel_init=nn.initializers.xavier_uniform(), bias_init=nn.initializers.normal(stddev=1e-6))
        width = x.shape[-1]
        x = nn.Dense(self.mlp_dim, **inits)(x)
        x = nn.with_logical_constraint(x, ("act_batch", "act_len", "act_emb"))  # not the stream, but so it is called
        return nn.Dense(width, **inits)(nn.gelu(x))


class ViTBlock(nn.Module):
    heads: int

    @nn.compact
    def __call__(self, x):
        x = nn.with_logical_constraint(x, ("act_batch", "act_len", "act_emb"))
        y = nn.LayerNorm()(x)
        y = nn.MultiHeadDotProductAttention(
            num_heads=self.heads, kernel_init=nn.initializers.xavier_uniform(), deterministic=True
        )(y, y)
        x = x + nn.with_logical_constraint(y, ("act_batch", "act_len", "act_emb"))
        x = x + ViTMlp(2 * x.shape[-1])(nn.LayerNorm()(x))
        return nn.with_logical_constraint(x, ("act_batch", "act_len", "act_emb"))


class MAPHead(nn.Module):
    """One learned query attends to all patches."""

    heads: int

    @nn.compact
    def __call__(self, x):
        probe = self.param("probe", nn.initializers.xavier_uniform(), (1, 1, x.shape[-1]))
        x = nn.MultiHeadDotProductAttention(num_heads=self.heads)(jnp.tile(probe, [x.shape[0], 1, 1]), x)
        return (x + ViTMlp(2 * x.shape[-1])(nn.LayerNorm()(x)))[:, 0]


class ViT(nn.Module):
    classes: int = 10
    width: int = 16
    heads: int = 4

    @nn.compact
    def __call__(self, image, train=False):
        x = nn.Conv(self.width, (4, 4), strides=(4, 4), padding="VALID", name="embedding")(image)
        rows, height, width, dim = x.shape
        x = x.reshape(rows, height * width, dim) + sincos2d(height, width, dim)
        x = ViTBlock(self.heads, name="encoderblock_0")(nn.Dropout(0.0)(x, not train))
        x = MAPHead(self.heads)(nn.LayerNorm(name="encoder_norm")(x))
        return nn.Dense(self.classes, name="head", kernel_init=nn.initializers.zeros)(x)


class MlpBlock(nn.Module):
    mlp_dim: int

    @nn.compact
    def __call__(self, x):
        return nn.Dense(x.shape[-1])(nn.gelu(nn.Dense(self.mlp_dim)(x)))


class MixerBlock(nn.Module):
    tokens_dim: int
    channels_dim: int

    @nn.compact
    def __call__(self, x):
        y = jnp.swapaxes(nn.LayerNorm()(x), 1, 2)
        x = x + jnp.swapaxes(MlpBlock(self.tokens_dim, name="token_mixing")(y), 1, 2)
        return x + MlpBlock(self.channels_dim, name="channel_mixing")(nn.LayerNorm()(x))


class Mixer(nn.Module):
    @nn.compact
    def __call__(self, image, *, train: bool):
        del train
        x = nn.Conv(16, (2, 2), strides=(2, 2), name="stem")(image)
        x = x.reshape(len(x), -1, x.shape[-1])
        x = MixerBlock(32, 32)(x)
        x = jnp.mean(nn.LayerNorm(name="pre_head_layer_norm")(x), axis=1)
        return nn.Dense(10, kernel_init=nn.initializers.zeros, name="head")(x)


STEPS = optax.sgd(
    0.1, 0.9
)  # not Adam: a norm cancels the bias before it, and Adam scales up a zero gradient's rounding
EXAMPLES = {
    "mnist": Example(module=MnistCNN, loss=mnist_loss, batch=images, optimizer=STEPS),
    "convnext": Example(module=ConvNeXt, loss=convnext_loss, batch=images, optimizer=STEPS),
    "resnet": Example(
        module=ResNet(), loss=image_loss, batch=images, inputs=image, optimizer=optax.sgd(0.1, 0.9, nesterov=True)
    ),
    "vit": Example(module=ViT(), loss=image_loss, batch=images, inputs=image, optimizer=STEPS),
    "mixer": Example(
        module=Mixer(), loss=image_loss, batch=images, inputs=image, options={"train": False}, optimizer=STEPS
    ),
}
