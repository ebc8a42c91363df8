"""Decoders in NNX, as their authors write them, and small. None knows of jaxpar.

Gemma      einsums of three dims, grouped queries, rotary positions, gated MLP, a tied table, capped logits
NanoGPT    layers stacked by `nnx.vmap`, scanned and rematerialized; dropout with keys of its own
Tuned      LoRA beside frozen layers, by `nnx.LoRA` and `optax.multi_transform`
"""

from functools import partial

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from published.example import Example, language_loss, tokens


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


class GPTBlock(nnx.Module):
    def __init__(self, dim: int, heads: int, rate: float, *, rngs: nnx.Rngs):
        self.ln_1, self.ln_2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(
            num_heads=heads, in_features=dim, use_bias=False, dropout_rate=0.0, decode=False, rngs=rngs
        )
        self.fc, self.proj = nnx.Linear(dim, 4 * dim, rngs=rngs), nnx.Linear(4 * dim, dim, rngs=rngs)
        self.dropout = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x):
        x = x + self.attn(self.ln_1(x), mask=nnx.make_causal_mask(x[..., 0]))
        return x + self.dropout(self.proj(nnx.gelu(self.fc(self.ln_2(x)))))


class NanoGPT(nnx.Module):
    def __init__(self, vocab=32, length=8, dim=16, heads=4, layers=2, rate=0.1, *, rngs: nnx.Rngs):
        self.wte, self.wpe = nnx.Embed(vocab, dim, rngs=rngs), nnx.Embed(length, dim, rngs=rngs)
        self.layers = layers

        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=0, out_axes=0)
        def stacked(rngs: nnx.Rngs):
            return GPTBlock(dim, heads, rate, rngs=rngs)

        self.blocks = stacked(rngs)
        self.ln_f = nnx.LayerNorm(dim, rngs=rngs)

    def __call__(self, text):
        x = self.wte(text) + self.wpe(jnp.arange(text.shape[1]))

        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)
        @nnx.remat
        def layers(x, block):
            return block(x)

        return self.wte.attend(self.ln_f(layers(x, self.blocks)))


class Tuned(nnx.Module):
    """A pretrained network of which only low-rank corrections and the head are trained."""

    def __init__(self, vocab=32, dim=16, rank=4, *, rngs: nnx.Rngs):
        def adapted(into, out):
            return nnx.LoRA(into, rank, out, base_module=nnx.Linear(into, out, rngs=rngs), rngs=rngs)

        self.embed = nnx.Embed(vocab, dim, rngs=rngs)
        self.up, self.down = adapted(dim, 2 * dim), adapted(2 * dim, dim)
        self.head = nnx.Linear(dim, vocab, rngs=rngs)

    def __call__(self, text):
        x = self.embed(text)
        return self.head(x + self.down(nnx.gelu(self.up(x))))


def trained(params):
    """Returns for each parameter whether it is trained."""
    path = lambda keys, _: jax.tree_util.keystr(keys)  # noqa: E731
    return jax.tree.map(
        lambda path: "tuned" if "lora" in path or "head" in path else "frozen",
        jax.tree_util.tree_map_with_path(path, params),
    )


ADAM = optax.adamw(5e-3, eps=1e-4)  # with 1e-8 a gradient that is rounding alone makes a step of full size
TUNING = optax.multi_transform({"tuned": ADAM, "frozen": optax.set_to_zero()}, trained)
EXAMPLES = {
    "gemma": Example(module=Gemma, loss=language_loss, batch=tokens, optimizer=ADAM),
    "nanogpt": Example(module=NanoGPT, loss=language_loss, batch=tokens, optimizer=ADAM),
    "lora": Example(module=Tuned, loss=language_loss, batch=tokens, optimizer=TUNING),
}
