"""Published architectures, narrow and as users write them, that give `jp.pipelined` pieces of different programs.

alexnet     linen   convolutions of three kernel sizes, pools that are pieces of their own, dense layers
vgg16       nnx     a piece for each of the 13 convolutions and 3 dense layers
resnet      linen   basic blocks with BatchNorm, whose convolution and norm are handed down as partials
batch_norm  nnx     convolutions with BatchNorm
gnmt        nnx     LSTM layers; the mask rides along, and each layer of the decoder attends to the encoder's output
t5          linen   encoder and decoder that close over masks and position biases; the head is the embedding
unet        nnx     a U-Net whose pieces close over a list of skips
two_towers  nnx     an image tower, then a text tower, with a contrastive loss
captioner   linen   a ViT, then a causal decoder of text that attends to it

MODELS has them by name.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp

CLASSES, VOCAB, DIM, HEADS = 10, 32, 16, 4


@dataclass(frozen=True)
class UnequalModel:
    """A model whose pieces are of different programs, with its data.

    Attributes:
      make: The model, as `jp.compose` takes it.
      batch: Maps a number of rows to a seeded batch.
      loss: Of (model, batch): a sum and a count.
      pieces: Number of pieces that the model gives `jp.pipelined`.
      bare: The class of the NNX model or the Linen module, which train without jaxpar.
    """

    make: Callable
    batch: Callable[[int], dict[str, np.ndarray]]
    loss: Callable
    pieces: int
    bare: Any


# Batches and losses.


def labeled_images(rows, size=32):
    numbers = np.random.default_rng(0)
    images = numbers.normal(size=(rows, size, size, 3)).astype(np.float32)
    return {"images": images, "labels": numbers.integers(0, CLASSES, rows).astype(np.int32)}


def sentences(numbers, rows, length):
    """Returns tokens [rows, length] of sentences of different lengths, at least four, padded with 0 at their ends."""
    tokens = numbers.integers(1, VOCAB, (rows, length))
    return np.where(np.arange(length) < numbers.integers(4, length + 1, (rows, 1)), tokens, 0).astype(np.int32)


def translations(rows):
    numbers = np.random.default_rng(0)
    return {"source": sentences(numbers, rows, 10), "target": sentences(numbers, rows, 8)}


def noisy_images(rows, size=16):
    images, noise = np.random.default_rng(0).normal(size=(2, rows, size, size, 3)).astype(np.float32)
    return {"images": images, "noise": noise}


def captioned_images(rows):
    return {"images": labeled_images(rows, 16)["images"], "text": sentences(np.random.default_rng(1), rows, 8)}


def classification_loss(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["images"]), batch["labels"])
    return losses.sum(), losses.size


def token_loss(logits, labels):
    """Returns the summed cross-entropy of tokens that are no padding, and their number."""
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, labels)
    weights = (labels > 0).astype(jnp.float32)
    return (losses * weights).sum(), weights.sum()


def translation_loss(model, batch):
    return token_loss(model(batch["source"], batch["target"][:, :-1]), batch["target"][:, 1:])


def caption_loss(model, batch):
    return token_loss(model(batch["images"], batch["text"][:, :-1]), batch["text"][:, 1:])


def denoising_loss(model, batch):
    errors = ((model(batch["images"] + batch["noise"]) - batch["noise"]) ** 2).sum(axis=-1)
    return errors.sum(), errors.size


def contrastive_loss(model, batch):
    """Each image finds its text among those of the rows given, and each text its image."""
    images, texts, scale = model(batch["images"], batch["text"])
    logits, labels = scale * images @ texts.T, jnp.arange(len(images))
    losses = optax.softmax_cross_entropy_with_integer_labels(jnp.stack([logits, logits.T]), jnp.stack([labels, labels]))
    return losses.sum() / 2, len(images)


# Images to classes.


class AlexNet(nn.Module):
    @nn.compact
    def __call__(self, images):
        def conv(features, kernel, strides=1):
            layer = nn.Conv(features, (kernel, kernel), strides=strides)
            return lambda x: nn.relu(layer(x))

        def dense(features):
            layer = nn.Dense(features)
            return lambda x: nn.relu(layer(x))

        def flatten(x):
            return x.reshape(len(x), -1)

        pool = partial(nn.max_pool, window_shape=(3, 3), strides=(2, 2), padding="SAME")
        pieces = [conv(8, 7, strides=2), pool, conv(16, 5), pool, conv(24, 3), conv(24, 3), conv(16, 3), pool]
        pieces += [flatten, dense(48), dense(48), nn.Dense(CLASSES)]
        return jp.pipelined(pieces, images)


class VGG16(nnx.Module):
    stages = ((4, 4), (8, 8), (16, 16, 16), (24, 24, 24), (24, 24, 24))

    def __init__(self, rngs: nnx.Rngs):
        kernel_init = nnx.initializers.he_normal()
        widths = [3, *(width for stage in self.stages for width in stage)]
        self.convs = nnx.List(
            nnx.Conv(inputs, outputs, (3, 3), kernel_init=kernel_init, rngs=rngs)
            for inputs, outputs in pairwise(widths)
        )
        self.dense1 = nnx.Linear(widths[-1], 32, kernel_init=kernel_init, rngs=rngs)
        self.dense2 = nnx.Linear(32, 32, kernel_init=kernel_init, rngs=rngs)
        self.dense3 = nnx.Linear(32, CLASSES, kernel_init=nnx.initializers.normal(0.05), rngs=rngs)

    def __call__(self, images):
        def run(conv, pool, x):
            x = nnx.relu(conv(x))
            return nnx.max_pool(x, (2, 2), strides=(2, 2)) if pool else x

        ends = [i == len(stage) - 1 for stage in self.stages for i in range(len(stage))]
        pieces = [
            *(partial(run, conv, pool) for conv, pool in zip(self.convs, ends, strict=True)),
            lambda x: nnx.relu(self.dense1(x.reshape(len(x), -1))),
            lambda x: nnx.relu(self.dense2(x)),
            self.dense3,
        ]
        return jp.pipelined(pieces, images)


class ResNetBlock(nn.Module):
    """Two 3x3 convolutions, and a shortcut with a 1x1 convolution where the shape changes."""

    filters: int
    conv: Any
    norm: Any
    strides: tuple[int, int] = (1, 1)

    @nn.compact
    def __call__(self, x):
        y = self.conv(self.filters, (3, 3), self.strides)(x)
        y = nn.relu(self.norm()(y))
        y = self.norm()(self.conv(self.filters, (3, 3))(y))
        if x.shape != y.shape:
            x = self.conv(self.filters, (1, 1), self.strides, name="conv_proj")(x)
            x = self.norm(name="norm_proj")(x)
        return nn.relu(x + y)


class ResNet(nn.Module):
    stage_sizes: tuple[int, ...] = (2, 2, 2)
    filters: int = 8

    @nn.compact
    def __call__(self, images, train: bool = True):
        conv = partial(nn.Conv, use_bias=False)
        norm = partial(nn.BatchNorm, use_running_average=not train, momentum=0.9, epsilon=1e-5)

        def stem(x):
            x = conv(self.filters, (3, 3), name="conv_init")(x)
            return nn.relu(norm(name="bn_init")(x))

        def head(x):
            return nn.Dense(CLASSES)(jnp.mean(x, axis=(1, 2)))

        pieces = [stem]
        for i, blocks in enumerate(self.stage_sizes):
            for j in range(blocks):
                strides = (2, 2) if i > 0 and j == 0 else (1, 1)
                pieces.append(ResNetBlock(self.filters * 2**i, conv=conv, norm=norm, strides=strides))
        return jp.pipelined([*pieces, head], images)


class BatchNormCNN(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        conv = partial(nnx.Conv, kernel_size=(3, 3), use_bias=False, rngs=rngs)
        self.conv1, self.norm1 = conv(3, 8), nnx.BatchNorm(8, rngs=rngs)
        self.conv2, self.norm2 = conv(8, 16, strides=2), nnx.BatchNorm(16, rngs=rngs)
        self.conv3, self.norm3 = conv(16, 16, strides=2), nnx.BatchNorm(16, rngs=rngs)
        self.dense = nnx.Linear(16, CLASSES, rngs=rngs)

    def __call__(self, images):
        pieces = [
            lambda x: nnx.relu(self.norm1(self.conv1(x))),
            lambda x: nnx.relu(self.norm2(self.conv2(x))),
            lambda x: nnx.relu(self.norm3(self.conv3(x))),
            lambda x: x.mean(axis=(1, 2)),
        ]
        return self.dense(jp.pipelined(pieces, images))


# Sentences to sentences.


class GNMT(nnx.Module):
    """An encoder whose first layer reads both ways, and a decoder with residuals, whose layers attend to its output."""

    depth = 3  # layers of the encoder after the first, and of the decoder

    def __init__(self, rngs: nnx.Rngs):
        kernel_init, embedding_init = nnx.initializers.normal(0.5), nnx.initializers.normal(1.0)

        def lstm(inputs, **settings):
            return nnx.RNN(nnx.OptimizedLSTMCell(inputs, DIM, kernel_init=kernel_init, rngs=rngs), **settings)

        self.source_embed, self.target_embed = (
            nnx.Embed(VOCAB, DIM, embedding_init=embedding_init, rngs=rngs) for _ in range(2)
        )
        self.forward, self.backward = lstm(DIM), lstm(DIM, reverse=True, keep_order=True)
        self.encoder = nnx.List([lstm(2 * DIM), *(lstm(DIM) for _ in range(self.depth - 1))])
        self.queries = nnx.List(
            nnx.Linear(DIM, DIM, use_bias=False, kernel_init=kernel_init, rngs=rngs) for _ in range(self.depth)
        )
        self.decoder = nnx.List(lstm(2 * DIM) for _ in range(self.depth))
        self.classes = nnx.Linear(DIM, VOCAB, rngs=rngs)

    def __call__(self, source, target):
        def both_ways(x):
            tokens, mask = x
            embedded, lengths = self.source_embed(tokens), mask.sum(axis=1)
            return jnp.concatenate([self.forward(embedded), self.backward(embedded, seq_lengths=lengths)], -1), mask

        def encode(layer, x):
            states, mask = x
            outputs = layer(states)
            return (outputs + states if outputs.shape == states.shape else outputs), mask

        def begin_decoder(x):
            memory, mask = x
            return memory, mask, self.target_embed(target)

        def decode(query, layer, x):
            memory, mask, states = x
            scores = jnp.einsum("btd,bsd->bts", query(states), memory) / DIM**0.5
            context = nnx.softmax(scores, where=mask[:, None, :]) @ memory
            return memory, mask, states + layer(jnp.concatenate([states, context], -1))

        pieces = [both_ways]
        pieces += [partial(encode, layer) for layer in self.encoder]
        pieces.append(begin_decoder)
        pieces += [partial(decode, query, layer) for query, layer in zip(self.queries, self.decoder, strict=True)]
        _, _, states = jp.pipelined(pieces, (source, source > 0))
        return self.classes(states)


class RelativeBias(nn.Module):
    """Biases of the scores of attention, by head and by bucket of distances: a distance each, then ever wider."""

    causal: bool
    buckets: int = 8
    furthest: int = 16

    @nn.compact
    def __call__(self, length):
        distance = np.arange(length)[:, None] - np.arange(length)  # how far the key is behind the query
        buckets = self.buckets if self.causal else self.buckets // 2
        far, exact = np.abs(distance) if not self.causal else np.maximum(distance, 0), buckets // 2
        power = np.log(np.maximum(far, 1) / exact) / np.log(self.furthest / exact)
        bucket = np.where(far < exact, far, np.minimum(exact + (power * (buckets - exact)).astype(int), buckets - 1))
        bucket = bucket if self.causal else bucket + buckets * (distance < 0)
        table = self.param("table", nn.initializers.normal(0.5), (self.buckets, HEADS))
        return table[bucket].transpose(2, 0, 1)[None]


class T5Attention(nn.Module):
    """Attention without biases or a scale of its scores; adds the bias given."""

    @nn.compact
    def __call__(self, x, memory, mask, bias=0.0):
        project = partial(nn.DenseGeneral, (HEADS, DIM // HEADS), use_bias=False)
        query = project(kernel_init=nn.initializers.normal(0.1), name="query")(x)
        key, value = project(name="key")(memory), project(name="value")(memory)
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) + bias
        weights = nn.softmax(jnp.where(mask, scores, -1e9))
        mixed = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return nn.DenseGeneral(DIM, axis=(-2, -1), use_bias=False, name="out")(mixed)


class T5Layer(nn.Module):
    """A layer of the encoder, or with a memory, of the decoder."""

    @nn.compact
    def __call__(self, x, mask, bias, memory=None, memory_mask=None):
        y = nn.RMSNorm()(x)
        x = x + T5Attention(name="self_attention")(y, y, mask, bias)
        if memory is not None:
            x = x + T5Attention(name="cross_attention")(nn.RMSNorm()(x), memory, memory_mask)
        y = nn.relu(nn.Dense(2 * DIM, use_bias=False)(nn.RMSNorm()(x)))
        return x + nn.Dense(DIM, use_bias=False)(y)


class T5(nn.Module):
    encoder_layers: int = 2
    decoder_layers: int = 3

    def setup(self):
        self.embed = nn.Embed(VOCAB, DIM, embedding_init=nn.initializers.normal(1.0))
        self.encoder_bias, self.decoder_bias = RelativeBias(causal=False), RelativeBias(causal=True)
        self.encoder = [T5Layer() for _ in range(self.encoder_layers)]
        self.decoder = [T5Layer() for _ in range(self.decoder_layers)]
        self.encoder_norm, self.decoder_norm = nn.RMSNorm(), nn.RMSNorm()

    def __call__(self, source, target):
        mask = (source > 0)[:, None, None, :]
        causal = nn.make_causal_mask(target, dtype=bool) & (target > 0)[:, None, None, :]
        bias, causal_bias = self.encoder_bias(source.shape[1]), self.decoder_bias(target.shape[1])

        def begin_decoder(x):
            return self.encoder_norm(x), self.embed(target)

        def decode(layer, x):
            memory, y = x
            return memory, layer(y, causal, causal_bias, memory, mask)

        def head(x):
            _, y = x
            return self.embed.attend(self.decoder_norm(y) / DIM**0.5)

        pieces = [
            self.embed,
            *(partial(layer, mask=mask, bias=bias) for layer in self.encoder),
            begin_decoder,
            *(partial(decode, layer) for layer in self.decoder),
            head,
        ]
        return jp.pipelined(pieces, source)


# Images to images.


class ConvBlock(nnx.Module):
    def __init__(self, inputs, outputs, rngs):
        self.conv1 = nnx.Conv(inputs, outputs, (3, 3), rngs=rngs)
        self.norm1 = nnx.GroupNorm(outputs, num_groups=4, rngs=rngs)
        self.conv2 = nnx.Conv(outputs, outputs, (3, 3), rngs=rngs)
        self.norm2 = nnx.GroupNorm(outputs, num_groups=4, rngs=rngs)

    def __call__(self, x):
        x = nnx.silu(self.norm1(self.conv1(x)))
        return nnx.silu(self.norm2(self.conv2(x)))


class UNet(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        conv = partial(nnx.Conv, kernel_size=(3, 3), strides=2, rngs=rngs)
        up = partial(nnx.ConvTranspose, kernel_size=(2, 2), strides=(2, 2), rngs=rngs)
        self.down = nnx.List([ConvBlock(3, 8, rngs), ConvBlock(8, 16, rngs)])
        self.shrink = nnx.List([conv(8, 8), conv(16, 16)])
        self.middle = ConvBlock(16, 16, rngs)
        self.grow = nnx.List([up(16, 16), up(16, 8)])
        self.up = nnx.List([ConvBlock(32, 16, rngs), ConvBlock(16, 8, rngs)])
        self.out = nnx.Conv(8, 3, (1, 1), rngs=rngs)

    def __call__(self, images):
        skips = []

        def down(block, shrink, x):
            x = block(x)
            skips.append(x)
            return shrink(x)

        def up(grow, block, x):
            return block(jnp.concatenate([grow(x), skips.pop()], axis=-1))

        pieces = [partial(down, *layers) for layers in zip(self.down, self.shrink, strict=True)]
        pieces.append(self.middle)
        pieces += [partial(up, *layers) for layers in zip(self.grow, self.up, strict=True)]
        return self.out(jp.pipelined(pieces, images))


# Images and sentences.


class TextLayer(nnx.Module):
    def __init__(self, rngs):
        self.norm1, self.norm2 = nnx.LayerNorm(DIM, rngs=rngs), nnx.LayerNorm(DIM, rngs=rngs)
        self.attention = nnx.MultiHeadAttention(HEADS, DIM, use_bias=False, decode=False, rngs=rngs)
        self.dense1, self.dense2 = nnx.Linear(DIM, 2 * DIM, rngs=rngs), nnx.Linear(2 * DIM, DIM, rngs=rngs)

    def __call__(self, x, mask):
        x = x + self.attention(self.norm1(x), mask=mask)
        return x + self.dense2(nnx.gelu(self.dense1(self.norm2(x))))


class TwoTowers(nnx.Module):
    """Unit vectors of images and of texts, and the scale of their products."""

    def __init__(self, rngs: nnx.Rngs):
        conv = partial(nnx.Conv, kernel_size=(3, 3), strides=2, rngs=rngs)
        self.convs = nnx.List([conv(3, 8), conv(8, 16), conv(16, 24)])
        self.image_projection = nnx.Linear(24, DIM, use_bias=False, rngs=rngs)
        self.token_embed, self.position_embed = nnx.Embed(VOCAB, DIM, rngs=rngs), nnx.Embed(8, DIM, rngs=rngs)
        self.layers = nnx.List(TextLayer(rngs) for _ in range(3))
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.text_projection = nnx.Linear(DIM, DIM, use_bias=False, rngs=rngs)
        self.log_scale = nnx.Param(jnp.float32(np.log(5.0)))

    def __call__(self, images, text):
        mask = (text > 0)[:, None, None, :]

        def unit(x):
            return x / jnp.linalg.norm(x, axis=-1, keepdims=True)

        def end_images(x):
            return unit(self.image_projection(x.mean(axis=(1, 2))))

        def begin_text(image):
            return image, self.token_embed(text) + self.position_embed(jnp.arange(text.shape[1]))

        def text_layer(layer, x):
            image, y = x
            return image, layer(y, mask)

        def end_text(x):
            image, y = x
            last = y[jnp.arange(len(y)), (text > 0).sum(axis=1) - 1]
            return image, unit(self.text_projection(self.norm(last)))

        pieces = [lambda x, conv=conv: nnx.gelu(conv(x)) for conv in self.convs]
        pieces += [end_images, begin_text, *(partial(text_layer, layer) for layer in self.layers), end_text]
        image, text_vector = jp.pipelined(pieces, images)
        return image, text_vector, jnp.exp(self.log_scale[...])


class ViTLayer(nn.Module):
    """A layer of the encoder of images, or with a memory, of the decoder of text."""

    @nn.compact
    def __call__(self, x, memory=None, mask=None):
        attention = partial(nn.MultiHeadDotProductAttention, num_heads=HEADS, use_bias=False)
        x = x + attention(name="self_attention")(nn.LayerNorm()(x), mask=mask)
        if memory is not None:
            x = x + attention(name="cross_attention")(nn.LayerNorm()(x), memory)
        y = nn.gelu(nn.Dense(2 * DIM)(nn.LayerNorm()(x)))
        return x + nn.Dense(DIM)(y)


class Captioner(nn.Module):
    patch: int = 4

    @nn.compact
    def __call__(self, images, text):
        causal = nn.combine_masks(nn.make_causal_mask(text), nn.make_attention_mask(text > 0, text > 0))
        words = nn.Embed(VOCAB, DIM, name="token_embed")

        def positions(name, x):
            return x + self.param(name, nn.initializers.normal(0.1), (1, *x.shape[1:]))

        def patches(x):
            x = nn.Conv(DIM, (self.patch, self.patch), strides=self.patch, padding="VALID", name="patch_embed")(x)
            return positions("image_positions", x.reshape(len(x), -1, DIM))

        def begin_decoder(x):
            return nn.LayerNorm(name="encoder_norm")(x), positions("text_positions", words(text))

        def decode(layer, x):
            memory, y = x
            return memory, layer(y, memory, causal)

        pieces = [patches, *(ViTLayer(name=f"encoder_{i}") for i in range(3)), begin_decoder]
        pieces += [partial(decode, ViTLayer(name=f"decoder_{i}")) for i in range(3)]
        _, y = jp.pipelined(pieces, images)
        return nn.Dense(VOCAB, name="head")(nn.LayerNorm(name="decoder_norm")(y))


def linen_model(module, batch, loss, pieces):
    """Returns the entry of a Linen module, which is called with the arrays of its loss only when it is composed."""
    return UnequalModel(lambda rngs: jp.from_linen(module, *inputs(batch(2))), batch, loss, pieces, module)


def inputs(batch):
    """Returns what a model is called with: all but labels, and of the sentence to write all but the last token."""
    *known, last = batch.values()
    return known if last.ndim == 1 else [*known, last[:, :-1]]


MODELS = {
    "alexnet": linen_model(AlexNet(), labeled_images, classification_loss, 12),
    "vgg16": UnequalModel(VGG16, labeled_images, classification_loss, 16, VGG16),
    "resnet": linen_model(ResNet(), partial(labeled_images, size=16), classification_loss, 8),
    "batch_norm": UnequalModel(BatchNormCNN, partial(labeled_images, size=16), classification_loss, 4, BatchNormCNN),
    "gnmt": UnequalModel(GNMT, translations, translation_loss, 8, GNMT),
    "t5": linen_model(T5(), translations, translation_loss, 8),
    "unet": UnequalModel(UNet, noisy_images, denoising_loss, 5, UNet),
    "two_towers": UnequalModel(TwoTowers, captioned_images, contrastive_loss, 9, TwoTowers),
    "captioner": linen_model(Captioner(), captioned_images, caption_loss, 8),
}
