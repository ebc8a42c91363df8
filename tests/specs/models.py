"""Models without a single name of a dim, except in `Attending`: what is found must come of their programs."""

from functools import partial

import jax
import jax.numpy as jnp
from flax import nnx

import jaxpar as jp
from jaxpar.models.remat import remat


class Attention(nnx.Module):
    def __init__(self, dim, heads, kv_heads, rngs):
        self.heads, self.kv_heads, self.width = heads, kv_heads, dim // heads

        def linear(size):
            return nnx.Linear(dim, size, use_bias=False, rngs=rngs)

        self.q, self.k, self.v = linear(dim), linear(kv_heads * self.width), linear(kv_heads * self.width)
        self.o = linear(dim)

    def __call__(self, x):
        b, t, d = x.shape
        group = self.heads // self.kv_heads
        q = self.q(x).reshape(b, t, self.kv_heads, group, self.width)
        k = self.k(x).reshape(b, t, self.kv_heads, self.width)
        v = self.v(x).reshape(b, t, self.kv_heads, self.width)
        scores = jnp.einsum("btkgd,bskd->bkgts", q, k) * self.width**-0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        weights = jax.nn.softmax(scores, axis=-1)
        out = jnp.einsum("bkgts,bskd->btkgd", weights, v)
        out = out.reshape(b, t, d)
        return self.o(out)


class Mlp(nnx.Module):
    def __init__(self, dim, hidden, rngs):
        self.up = nnx.Linear(dim, hidden, use_bias=False, rngs=rngs)
        self.down = nnx.Linear(hidden, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        hidden = jax.nn.gelu(self.up(x))
        return self.down(hidden)


class Experts(nnx.Module):
    """A mixture by one-hot dispatch: einsums, with a capacity."""

    def __init__(self, dim, hidden, experts, capacity, rngs):
        key = rngs.params
        self.experts, self.capacity = experts, capacity
        self.route = nnx.Linear(dim, experts, use_bias=False, rngs=rngs)
        self.up = nnx.Param(jax.random.normal(key(), (experts, dim, hidden)) * 0.02)
        self.down = nnx.Param(jax.random.normal(key(), (experts, hidden, dim)) * 0.02)

    def __call__(self, x):
        b, t, d = x.shape
        rows = x.reshape(b * t, d)
        probs = jax.nn.softmax(self.route(rows))
        choice = jax.nn.one_hot(jnp.argmax(probs, -1), self.experts)
        place = (jnp.cumsum(choice, 0) - 1) * choice
        slot = jax.nn.one_hot(place.sum(-1).astype(int), self.capacity)
        dispatch = choice[:, :, None] * slot[:, None, :]
        inputs = jnp.einsum("tec,td->ecd", dispatch.astype(x.dtype), rows)
        hidden = jax.nn.gelu(jnp.einsum("ecd,edf->ecf", inputs, self.up[...].astype(x.dtype)))
        outputs = jnp.einsum("ecf,efd->ecd", hidden, self.down[...].astype(x.dtype))
        combine = dispatch * (probs * choice).sum(-1)[:, None, None]
        return jnp.einsum("tec,ecd->td", combine.astype(x.dtype), outputs).reshape(b, t, d)


class Block(nnx.Module):
    def __init__(self, dim, heads, kv_heads, mixer, rngs):
        self.before = nnx.RMSNorm(dim, rngs=rngs)
        self.after = nnx.RMSNorm(dim, rngs=rngs)
        self.attention = Attention(dim, heads, kv_heads, rngs)
        self.mixer = mixer(rngs)

    def __call__(self, x):
        x = x + self.attention(self.before(x))
        return x + self.mixer(self.after(x))


class Gpt(nnx.Module):
    def __init__(self, rngs, *, vocab=512, dim=64, heads=8, kv_heads=0, hidden=256, layers=2, experts=0, capacity=0):
        def mixer(rngs):
            return Experts(dim, hidden, experts, capacity, rngs) if experts else Mlp(dim, hidden, rngs)

        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.blocks = nnx.List([Block(dim, heads, kv_heads or heads, mixer, rngs) for _ in range(layers)])
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.out = nnx.Linear(dim, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x = self.embed(tokens)
        for block in self.blocks:
            x = block(x)
        return self.out(self.norm(x))


class ScannedGpt(nnx.Module):
    def __init__(self, rngs, *, vocab=512, dim=64, heads=8, hidden=256, layers=4):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0)
        def make(rngs):
            return Block(dim, heads, heads, lambda rngs: Mlp(dim, hidden, rngs), rngs)

        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.blocks = make(rngs)
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.out = nnx.Linear(dim, vocab, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        def run(x, block):
            return block(x)

        return self.out(self.norm(run(self.embed(tokens), self.blocks)))


class AlexNet(nnx.Module):
    def __init__(self, rngs, *, width=64, dense=4096, classes=1000, size=224):
        def conv(a, b, k, s):
            return nnx.Conv(a, b, (k, k), strides=s, rngs=rngs)

        w = width
        self.convs = nnx.List(
            [
                conv(3, w, 11, 4),
                conv(w, 3 * w, 5, 1),
                conv(3 * w, 6 * w, 3, 1),
                conv(6 * w, 4 * w, 3, 1),
                conv(4 * w, 4 * w, 3, 1),
            ]
        )
        side = ((-(-size // 4) // 2) // 2) // 2
        self.dense = nnx.List(
            [
                nnx.Linear(4 * w * side * side, dense, rngs=rngs),
                nnx.Linear(dense, dense, rngs=rngs),
                nnx.Linear(dense, classes, rngs=rngs),
            ]
        )

    def __call__(self, x):
        for index, conv in enumerate(self.convs):
            x = jax.nn.relu(conv(x))
            if index in (0, 1, 4):
                x = nnx.max_pool(x, (2, 2), strides=(2, 2))
        x = x.reshape(x.shape[0], -1)
        for dense in list(self.dense)[:-1]:
            x = jax.nn.relu(dense(x))
        return list(self.dense)[-1](x)


class Recommender(nnx.Module):
    def __init__(self, rngs, *, rows=4096, dim=64, features=26, hidden=512):
        self.table = nnx.Embed(rows, dim, rngs=rngs)
        self.one = nnx.Linear(features * dim, hidden, rngs=rngs)
        self.two = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, ids):
        x = self.table(ids)
        x = x.reshape(x.shape[0], -1)
        return self.two(jax.nn.relu(self.one(x)))


class Lstm(nnx.Module):
    def __init__(self, rngs, *, vocab=512, dim=64):
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.inner = nnx.Linear(dim, 4 * dim, use_bias=False, rngs=rngs)
        self.state = nnx.Linear(dim, 4 * dim, rngs=rngs)
        self.out = nnx.Linear(dim, vocab, rngs=rngs)

    def __call__(self, tokens):
        inputs = self.inner(self.embed(tokens))

        def step(carry, x):
            h, c = carry
            i, f, g, o = jnp.split(x + self.state(h), 4, axis=-1)
            c = jax.nn.sigmoid(f) * c + jax.nn.sigmoid(i) * jnp.tanh(g)
            h = jax.nn.sigmoid(o) * jnp.tanh(c)
            return (h, c), h

        zeros = jnp.zeros((tokens.shape[0], self.state.in_features), inputs.dtype)
        _, hidden = jax.lax.scan(step, (zeros, zeros), jnp.moveaxis(inputs, 1, 0))
        return self.out(jnp.moveaxis(hidden, 0, 1))


class StateSpace(nnx.Module):
    """A selective state space: its states, by an associative scan, are much larger than what is read from them."""

    def __init__(self, rngs, *, vocab=512, dim=64, inner=128, states=8):
        self.inner, self.states = inner, states
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.inputs = nnx.Linear(dim, 2 * inner, use_bias=False, rngs=rngs)
        self.conv = nnx.Conv(inner, inner, (4,), feature_group_count=inner, padding="CAUSAL", rngs=rngs)
        self.select = nnx.Linear(inner, 4 + 2 * states, use_bias=False, rngs=rngs)
        self.rate = nnx.Linear(4, inner, rngs=rngs)
        self.decay = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1))))
        self.skip = nnx.Param(jnp.ones(inner))
        self.out = nnx.Linear(inner, dim, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        stream = self.embed(tokens)
        x, gate = jnp.split(self.inputs(stream), 2, axis=-1)
        x = jax.nn.silu(self.conv(x))
        rate, write, read = jnp.split(self.select(x), [4, 4 + self.states], axis=-1)
        rate = jax.nn.softplus(self.rate(rate))
        kept = jnp.exp(jnp.einsum("bld,dn->bldn", rate, -jnp.exp(self.decay[...]).astype(rate.dtype)))
        new = jnp.einsum("bld,bln,bld->bldn", rate, write, x)
        _, states = jax.lax.associative_scan(lambda a, b: (a[0] * b[0], b[0] * a[1] + b[1]), (kept, new), axis=1)
        y = jnp.einsum("bldn,bln->bld", states, read) + x * self.skip[...].astype(x.dtype)
        return self.embed.attend(stream + self.out(y * jax.nn.silu(gate)))


class TwoTowers(nnx.Module):
    """Texts and pictures, each by a stack of blocks, compared over the whole batch."""

    def __init__(self, rngs, *, dim=64, heads=8, hidden=256, layers=1, vocab=512, patch=48):
        def block():
            return Block(dim, heads, heads, lambda rngs: Mlp(dim, hidden, rngs), rngs)

        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.patches = nnx.Linear(patch, dim, rngs=rngs)
        self.texts = nnx.List([block() for _ in range(layers)])
        self.pictures = nnx.List([block() for _ in range(layers)])

    def __call__(self, tokens, patches):
        text, picture = self.embed(tokens), self.patches(patches)
        for block in self.texts:
            text = block(text)
        for block in self.pictures:
            picture = block(picture)
        text, picture = text.mean(1), picture.mean(1)
        return text @ picture.T


class Attending(nnx.Module):
    """A decoder of one's own that calls jp.attention, and names its stream as the user does or does not."""

    def __init__(self, rngs, *, names=("batch", "seq", "embed"), dim=256, heads=8, layers=2):
        self.names, self.heads, self.remat = names, heads, "none"
        self.embed = nnx.Embed(64, dim, rngs=rngs)
        self.inputs = nnx.List([nnx.Linear(dim, 3 * dim, rngs=rngs) for _ in range(layers)])
        self.up = nnx.List([nnx.Linear(dim, 4 * dim, rngs=rngs) for _ in range(layers)])
        self.down = nnx.List([nnx.Linear(4 * dim, dim, rngs=rngs) for _ in range(layers)])

    def __call__(self, x):
        x = self.embed(x)
        if self.names:
            x = jp.constrain(x, *self.names)
        for layer in zip(self.inputs, self.up, self.down, strict=True):
            x = remat(partial(self.block, layer), self.remat)(x)
        return self.embed.attend(x)

    def block(self, layer, x):
        inputs, up, down = layer
        q, k, v = (part.reshape(*x.shape[:2], self.heads, -1) for part in jnp.split(inputs(x), 3, axis=-1))
        x = x + jp.attention(q, k, v, causal=True).reshape(x.shape)
        return x + down(nnx.gelu(up(x)))


def next_token(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][..., None], axis=-1)
    return -jnp.sum(picked), jnp.float32(picked.size)


def classes(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)
    picked = jnp.take_along_axis(jax.nn.log_softmax(logits), batch["y"][:, None], axis=-1)
    return -jnp.sum(picked), jnp.float32(picked.size)


def clicks(model, batch):
    logits = model(batch["x"]).astype(jnp.float32)[:, 0]
    losses = jnp.logaddexp(0.0, logits) - batch["y"] * logits
    return jnp.sum(losses), jnp.float32(losses.size)


def contrastive(model, batch):
    logits = model(batch["x"], batch["pictures"]).astype(jnp.float32)
    picked = jnp.diagonal(jax.nn.log_softmax(logits))
    return -jnp.sum(picked), jnp.float32(picked.size)


class FusedAttention(nnx.Module):
    """Queries, keys and values are columns of one matrix, as in GPT-2; `parts` says how they are taken from it."""

    def __init__(self, dim, heads, parts, rngs):
        self.heads, self.parts = heads, parts
        self.qkv, self.out = nnx.Linear(dim, 3 * dim, rngs=rngs), nnx.Linear(dim, dim, rngs=rngs)

    def __call__(self, x):
        b, t, d = x.shape
        whole = self.qkv(x)
        if self.parts == "reshape":
            q, k, v = whole.reshape(b, t, 3, self.heads, -1).transpose(2, 0, 3, 1, 4)
        else:
            cut = [whole[..., :d], whole[..., d : 2 * d], whole[..., 2 * d :]]
            parts = jnp.split(whole, 3, axis=-1) if self.parts == "split" else cut
            q, k, v = (y.reshape(b, t, self.heads, -1).transpose(0, 2, 1, 3) for y in parts)
        scores = q @ k.transpose(0, 1, 3, 2) * (d // self.heads) ** -0.5
        scores = jnp.where(jnp.tril(jnp.ones((t, t), bool)), scores, -1e9)
        heads = jax.nn.softmax(scores, axis=-1) @ v
        return self.out(heads.transpose(0, 2, 1, 3).reshape(b, t, d))


class Gpt2(nnx.Module):
    """A decoder as GPT-2, whose head is its embedding."""

    def __init__(self, rngs, *, vocab=512, dim=64, heads=8, hidden=256, layers=2, parts="split"):
        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.attention = nnx.List([FusedAttention(dim, heads, parts, rngs) for _ in range(layers)])
        self.mlp = nnx.List([Mlp(dim, hidden, rngs) for _ in range(layers)])
        self.norms = nnx.List([nnx.LayerNorm(dim, rngs=rngs) for _ in range(2 * layers)])

    def __call__(self, tokens):
        x = self.embed(tokens)
        for number, (attention, mlp) in enumerate(zip(self.attention, self.mlp, strict=True)):
            x = x + attention(self.norms[2 * number](x))
            x = x + mlp(self.norms[2 * number + 1](x))
        return self.embed.attend(x)
