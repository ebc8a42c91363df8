"""Models in plain Flax NNX of many kinds, none of which names a sharding, with batches and losses.

Each function returns (module, its arguments, loss, shapes of a batch) for `tests.bench.traced_models`.
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

Case = tuple[Callable[..., nnx.Module], Callable[[Any, Any], Any], dict[str, jax.ShapeDtypeStruct]]
BF16 = jnp.bfloat16


def ids(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "int32")


def floats(*shape: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def cross_entropy(logits, labels):
    """Returns (sum, count) of the cross entropy, in float32."""
    logs = jax.nn.log_softmax(logits.astype(jnp.float32))
    return -jnp.sum(jnp.take_along_axis(logs, labels[..., None], axis=-1)), labels.size


class Attention(nnx.Module):
    """Multi-head attention in plain JAX."""

    def __init__(self, dim, heads, *, kv_heads=None, causal=True, rngs):
        self.heads, self.kv, self.causal = heads, kv_heads or heads, causal
        width = dim // heads
        self.q = nnx.Linear(dim, dim, use_bias=False, dtype=BF16, rngs=rngs)
        self.k = nnx.Linear(dim, self.kv * width, use_bias=False, dtype=BF16, rngs=rngs)
        self.v = nnx.Linear(dim, self.kv * width, use_bias=False, dtype=BF16, rngs=rngs)
        self.out = nnx.Linear(dim, dim, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        batch, seq, dim = x.shape
        q = self.q(x).reshape(batch, seq, self.kv, self.heads // self.kv, -1)
        k, v = (layer(x).reshape(batch, seq, self.kv, -1) for layer in (self.k, self.v))
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k).astype(jnp.float32) / q.shape[-1] ** 0.5
        if self.causal:
            scores = jnp.where(jnp.tril(jnp.ones((seq, seq), bool)), scores, -1e30)
        weights = jax.nn.softmax(scores).astype(BF16)
        return self.out(jnp.einsum("bkgts,bskd->btkgd", weights, v).reshape(batch, seq, dim))


class Mlp(nnx.Module):
    """Two matmuls and gelu."""

    def __init__(self, dim, hidden, *, rngs):
        self.up = nnx.Linear(dim, hidden, dtype=BF16, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.gelu(self.up(x)))


class Block(nnx.Module):
    """A pre-norm block."""

    def __init__(self, dim, heads, *, rngs, **kwargs):
        self.norm1, self.norm2 = (nnx.LayerNorm(dim, dtype=BF16, rngs=rngs) for _ in range(2))
        self.attention, self.mlp = Attention(dim, heads, rngs=rngs, **kwargs), Mlp(dim, 4 * dim, rngs=rngs)

    def __call__(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


class Gpt(nnx.Module):
    """A decoder, unrolled or scanned."""

    def __init__(self, *, layers, dim, heads, vocab, scanned=False, kv_heads=None, rngs):
        self.embed = nnx.Embed(vocab, dim, dtype=BF16, rngs=rngs)
        self.scanned = scanned
        make = partial(Block, dim, heads, kv_heads=kv_heads)
        if scanned:

            @nnx.split_rngs(splits=layers)
            @nnx.vmap
            def stack(rngs):
                return make(rngs=rngs)

            self.blocks = stack(rngs)
        else:
            self.blocks = nnx.List([make(rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(dim, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(dim, vocab, use_bias=False, dtype=BF16, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        if self.scanned:

            @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
            def run(x, block):
                return block(x)

            x = run(x, self.blocks)
        else:
            for block in self.blocks:
                x = block(x)
        return self.head(self.norm(x))


def gpt(*, rows=8, seq=512, layers=4, dim=512, heads=8, vocab=8192, **kwargs) -> Case:
    """A decoder with learned embeddings."""
    model = lambda rngs: Gpt(layers=layers, dim=dim, heads=heads, vocab=vocab, rngs=rngs, **kwargs)  # noqa: E731
    loss = lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"])  # noqa: E731
    return model, loss, {"inputs": ids(rows, seq), "targets": ids(rows, seq)}


class Vit(nnx.Module):
    """Blocks over patches, without a mask."""

    def __init__(self, *, layers, dim, heads, patch, side, classes=1000, rngs):
        self.patches = nnx.Conv(3, dim, (patch, patch), strides=patch, dtype=BF16, rngs=rngs)
        self.positions = nnx.Param(jnp.zeros(((side // patch) ** 2, dim)))
        self.blocks = nnx.List([Block(dim, heads, causal=False, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(dim, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(dim, classes, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1]) + self.positions[...].astype(BF16)
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


def vit(*, rows=32, side=128, layers=4, dim=384, heads=6, patch=8) -> Case:
    """A vision transformer with mean pooling."""
    model = lambda rngs: Vit(layers=layers, dim=dim, heads=heads, patch=patch, side=side, rngs=rngs)  # noqa: E731
    return model, classify, {"inputs": floats(rows, side, side, 3), "labels": ids(rows)}


def classify(model, batch):
    return cross_entropy(model(batch["inputs"]), batch["labels"])


class MixerBlock(nnx.Module):
    """Mlps over tokens and over channels."""

    def __init__(self, tokens, dim, *, rngs):
        self.norm1, self.norm2 = (nnx.LayerNorm(dim, dtype=BF16, rngs=rngs) for _ in range(2))
        self.tokens, self.channels = Mlp(tokens, 2 * tokens, rngs=rngs), Mlp(dim, 4 * dim, rngs=rngs)

    def __call__(self, x):
        x = x + self.tokens(self.norm1(x).swapaxes(1, 2)).swapaxes(1, 2)
        return x + self.channels(self.norm2(x))


class Mixer(nnx.Module):
    """An MLP-Mixer."""

    def __init__(self, *, layers, dim, patch, side, classes=1000, rngs):
        self.patches = nnx.Conv(3, dim, (patch, patch), strides=patch, dtype=BF16, rngs=rngs)
        self.blocks = nnx.List([MixerBlock((side // patch) ** 2, dim, rngs=rngs) for _ in range(layers)])
        self.norm = nnx.LayerNorm(dim, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(dim, classes, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        x = self.patches(x)
        x = x.reshape(x.shape[0], -1, x.shape[-1])
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(self.norm(x), axis=1))


def mixer(*, rows=64, side=128, layers=4, dim=512, patch=8) -> Case:
    """An MLP-Mixer."""
    model = lambda rngs: Mixer(layers=layers, dim=dim, patch=patch, side=side, rngs=rngs)  # noqa: E731
    return model, classify, {"inputs": floats(rows, side, side, 3), "labels": ids(rows)}


class ConvNorm(nnx.Module):
    """A convolution, a group norm."""

    def __init__(self, before, after, kernel, *, stride=1, rngs):
        self.conv = nnx.Conv(before, after, (kernel, kernel), strides=stride, use_bias=False, dtype=BF16, rngs=rngs)
        self.norm = nnx.GroupNorm(after, num_groups=8, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        return self.norm(self.conv(x))


class Residual(nnx.Module):
    """A bottleneck block."""

    def __init__(self, before, after, *, stride=1, rngs):
        inner = after // 4
        self.one = ConvNorm(before, inner, 1, rngs=rngs)
        self.two = ConvNorm(inner, inner, 3, stride=stride, rngs=rngs)
        self.three = ConvNorm(inner, after, 1, rngs=rngs)
        self.skip = ConvNorm(before, after, 1, stride=stride, rngs=rngs) if stride > 1 or before != after else None

    def __call__(self, x):
        y = self.three(nnx.relu(self.two(nnx.relu(self.one(x)))))
        return nnx.relu(y + (x if self.skip is None else self.skip(x)))


class ResNet(nnx.Module):
    """A residual network of bottlenecks."""

    def __init__(self, *, blocks, width, classes=1000, rngs):
        self.stem = ConvNorm(3, width, 7, stride=2, rngs=rngs)
        layers, before = [], width
        for stage, count in enumerate(blocks):
            for block in range(count):
                after = 4 * width * 2**stage
                layers.append(Residual(before, after, stride=2 if stage and not block else 1, rngs=rngs))
                before = after
        self.blocks = nnx.List(layers)
        self.head = nnx.Linear(before, classes, dtype=BF16, rngs=rngs)

    def __call__(self, x):
        x = nnx.max_pool(nnx.relu(self.stem(x)), (3, 3), strides=(2, 2), padding="SAME")
        for block in self.blocks:
            x = block(x)
        return self.head(jnp.mean(x, axis=(1, 2)))


def resnet(*, rows=32, side=128, blocks=(2, 2), width=64) -> Case:
    """A residual network."""
    model = lambda rngs: ResNet(blocks=blocks, width=width, rngs=rngs)  # noqa: E731
    return model, classify, {"inputs": floats(rows, side, side, 3), "labels": ids(rows)}


class Lstm(nnx.Module):
    """A language model of one LSTM, a scan over tokens."""

    def __init__(self, *, dim, vocab, rngs):
        self.embed = nnx.Embed(vocab, dim, dtype=BF16, rngs=rngs)
        self.inputs = nnx.Linear(dim, 4 * dim, dtype=BF16, rngs=rngs)
        self.hidden = nnx.Linear(dim, 4 * dim, use_bias=False, dtype=BF16, rngs=rngs)
        self.head = nnx.Linear(dim, vocab, dtype=BF16, rngs=rngs)

    def __call__(self, tokens):
        x = self.inputs(self.embed(tokens)).swapaxes(0, 1)
        weight = self.hidden.kernel[...].astype(BF16)

        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x + h @ weight, 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((x.shape[1], x.shape[2] // 4), BF16)
        return self.head(jax.lax.scan(step, (zeros, zeros), x)[1].swapaxes(0, 1))


def lstm(*, rows=64, seq=128, dim=512, vocab=4096) -> Case:
    """An LSTM language model."""
    model = lambda rngs: Lstm(dim=dim, vocab=vocab, rngs=rngs)  # noqa: E731
    loss = lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"])  # noqa: E731
    return model, loss, {"inputs": ids(rows, seq), "targets": ids(rows, seq)}


class TwoTowers(nnx.Module):
    """Encoders of images and of texts."""

    def __init__(self, *, layers, dim, heads, side, patch, vocab, rngs):
        self.image = Vit(layers=layers, dim=dim, heads=heads, patch=patch, side=side, classes=256, rngs=rngs)
        self.text = Gpt(layers=layers, dim=dim, heads=heads, vocab=vocab, rngs=rngs)
        self.text.head = nnx.Linear(dim, 256, dtype=BF16, rngs=rngs)

    def __call__(self, images, tokens):
        return self.image(images), jnp.mean(self.text(tokens), axis=1)


def contrast(model, batch):
    left, right = (x.astype(jnp.float32) for x in model(batch["images"], batch["inputs"]))
    left, right = (x / jnp.sqrt(jnp.sum(x * x, axis=-1, keepdims=True) + 1e-6) for x in (left, right))
    scores, labels = 20.0 * left @ right.T, jnp.arange(left.shape[0])
    return cross_entropy(scores, labels)[0] + cross_entropy(scores.T, labels)[0], labels.size


def two_towers(*, rows=64, side=96, seq=64, layers=3, dim=384, heads=6, patch=8, vocab=8192) -> Case:
    """Contrastive image and text encoders."""
    sizes = {"layers": layers, "dim": dim, "heads": heads, "side": side, "patch": patch, "vocab": vocab}
    model = lambda rngs: TwoTowers(**sizes, rngs=rngs)  # noqa: E731
    return model, contrast, {"images": floats(rows, side, side, 3), "inputs": ids(rows, seq)}


class UNet(nnx.Module):
    """Down and up again, with skips."""

    def __init__(self, *, width, depth, rngs):
        widths = [width * 2**level for level in range(depth)]
        self.down = nnx.List([ConvNorm(a, b, 3, rngs=rngs) for a, b in zip([3, *widths], widths, strict=False)])
        self.middle = ConvNorm(widths[-1], widths[-1], 3, rngs=rngs)
        outputs = [*reversed(widths)]
        self.up = nnx.List(
            [ConvNorm(a + b, b, 3, rngs=rngs) for a, b in zip([outputs[0], *outputs], outputs, strict=False)]
        )
        self.out = nnx.Conv(width, 3, (1, 1), dtype=BF16, rngs=rngs)

    def __call__(self, x):
        skips = []
        for layer in self.down:
            x = nnx.silu(layer(x))
            skips.append(x)
            x = nnx.avg_pool(x, (2, 2), strides=(2, 2))
        x = nnx.silu(self.middle(x))
        for layer, skip in zip(self.up, reversed(skips), strict=True):
            x = jnp.repeat(jnp.repeat(x, 2, axis=1), 2, axis=2)
            x = nnx.silu(layer(jnp.concatenate([x, skip], axis=-1)))
        return self.out(x)


def denoise(model, batch):
    error = model(batch["noisy"]).astype(jnp.float32) - batch["clean"]
    return jnp.sum(error * error), error.size


def unet(*, rows=16, side=128, width=64, depth=3) -> Case:
    """A denoising U-Net."""
    model = lambda rngs: UNet(width=width, depth=depth, rngs=rngs)  # noqa: E731
    return model, denoise, {"noisy": floats(rows, side, side, 3), "clean": floats(rows, side, side, 3)}


class Recommender(nnx.Module):
    """Tables that are looked up, and a few matmuls."""

    def __init__(self, *, items, dim, fields, hidden, rngs):
        self.items = nnx.Embed(items, dim, dtype=BF16, rngs=rngs)
        self.one = nnx.Linear(fields * dim, hidden, dtype=BF16, rngs=rngs)
        self.two = nnx.Linear(hidden, hidden, dtype=BF16, rngs=rngs)
        self.out = nnx.Linear(hidden, 1, dtype=BF16, rngs=rngs)

    def __call__(self, ids):
        x = self.items(ids)
        return self.out(nnx.relu(self.two(nnx.relu(self.one(x.reshape(x.shape[0], -1))))))[:, 0]


def click(model, batch):
    logits = model(batch["inputs"]).astype(jnp.float32)
    return jnp.sum(jax.nn.softplus(logits) - batch["clicked"] * logits), logits.size


def recommender(*, rows=8192, items=200_000, dim=64, fields=26, hidden=1024) -> Case:
    """A click model."""
    model = lambda rngs: Recommender(items=items, dim=dim, fields=fields, hidden=hidden, rngs=rngs)  # noqa: E731
    return model, click, {"inputs": ids(rows, fields), "clicked": floats(rows)}


class Experts(nnx.Module):
    """A mixture of experts by one-hot dispatch."""

    def __init__(self, dim, hidden, count, *, rngs):
        self.router = nnx.Linear(dim, count, use_bias=False, dtype=BF16, rngs=rngs)
        init = nnx.initializers.normal(0.02)
        self.up = nnx.Param(init(rngs.params(), (count, dim, hidden)))
        self.down = nnx.Param(init(rngs.params(), (count, hidden, dim)))

    def __call__(self, x):
        seq = x.shape[1]
        scores = jax.nn.softmax(self.router(x).astype(jnp.float32))
        weight, choice = jax.lax.top_k(scores, 1)
        count = scores.shape[-1]
        capacity = 2 * seq // count
        chosen = jax.nn.one_hot(choice[..., 0], count)
        place = (jnp.cumsum(chosen, axis=1) - 1) * chosen
        dispatch = (chosen[..., None] * jax.nn.one_hot(place.sum(-1).astype(jnp.int32), capacity)[:, :, None]).astype(
            BF16
        )
        slots = jnp.einsum("btec,btd->ebcd", dispatch, x)
        hidden = nnx.gelu(jnp.einsum("ebcd,edh->ebch", slots, self.up[...].astype(BF16)))
        out = jnp.einsum("ebch,ehd->ebcd", hidden, self.down[...].astype(BF16))
        return jnp.einsum("btec,ebcd->btd", dispatch, out) * weight.astype(BF16)


def mixture(*, rows=8, seq=512, layers=2, dim=512, heads=8, experts=4, vocab=4096) -> Case:
    """A decoder whose blocks have experts."""

    def model(rngs):
        net = Gpt(layers=layers, dim=dim, heads=heads, vocab=vocab, rngs=rngs)
        for block in net.blocks:
            block.mlp = Experts(dim, 2 * dim, experts, rngs=rngs)
        return net

    loss = lambda model, batch: cross_entropy(model(batch["inputs"]), batch["targets"])  # noqa: E731
    return model, loss, {"inputs": ids(rows, seq), "targets": ids(rows, seq)}


CASES: dict[str, Callable[[], Case]] = {
    "GPT": gpt,
    "GPT, scanned": partial(gpt, scanned=True),
    "ViT": vit,
    "mixer": mixer,
    "ResNet": resnet,
    "LSTM": lstm,
    "two towers": two_towers,
    "U-Net": unet,
    "recommender": recommender,
    "mixture": mixture,
}
