"""One small transformer whose dims bear the names of several code bases, and the FLOP that a device makes of it."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp
from jaxpar.hlo.flop import hardware_flop
from jaxpar.hlo.text import parse

VOCAB, DIM, HIDDEN, HEADS, SEQ, BATCH = 32, 16, 32, 4, 8, 16

# of an activation: batch, sequence of queries and of keys, embed, mlp, heads, head_dim, vocab; of a parameter: the rest
WORDS = {
    "maxtext": {
        **dict(b="activation_batch", s="activation_norm_length", k="activation_kv_length", e="activation_embed"),
        **dict(m="activation_mlp", h="activation_heads", d="activation_kv", heads="q_heads", head_dim="kv"),
        **dict(v="activation_vocab"),
    },
    "t5x": dict(b="batch", s="length", k="length", e="embed", m="mlp", h="heads", d="kv", v="vocab", head_dim="kv"),
    "big_vision": dict(
        b="act_batch", s="act_len", k=None, e="act_emb", m="act_mlp", h="act_heads", d="act_dim", v="act_vocab"
    ),
    "maxdiffusion": {
        **dict(b="activation_batch", s="activation_self_attn_q_length", k="activation_self_attn_kv_length"),
        **dict(e="activation_embed", m="mlp", h="activation_self_attn_heads", d="activation_kv", v="vocab"),
    },
    "haliax": dict(b="batch", s="position", k="key_position", e="embed", m="mlp", h="heads", d="head_size", v="vocab"),
    "jaxpar": dict(b="batch", s="seq", k="keys", e="embed", m="mlp", h="heads", d="head_dim", v="vocab"),
    "jaxpar, of T5X's form": dict(b="batch", s="seq", k="seq", e="embed", m="mlp", h="heads", d="head_dim", v="vocab"),
    "own": dict(b="rows", s="places", k="others", e="width", m="inner", h="parts", d="part", v="words"),
}


class Attention(nn.Module):
    """Attention, then a ReLU layer, in the way of T5X and MaxText: every activation has names."""

    words: str

    @nn.compact
    def __call__(self, tokens):
        words = WORDS[self.words]
        named = lambda x, *dims: nn.with_logical_constraint(x, tuple(words[dim] for dim in dims))  # noqa: E731
        box = lambda *dims: nn.with_logical_partitioning(nn.initializers.normal(0.1), dims)  # noqa: E731
        heads, head_dim = words.get("heads", "heads"), words.get("head_dim", "head_dim")
        x = named(self.param("table", box("vocab", "embed"), (VOCAB, DIM))[tokens], *"bse")
        shape, each = (DIM, HEADS, DIM // HEADS), box("embed", heads, head_dim)
        q = named(jnp.einsum("bse,ehd->bshd", x, self.param("query", each, shape)), *"bshd")
        k = named(jnp.einsum("bse,ehd->bshd", x, self.param("key", each, shape)), *"bkhd")
        v = named(jnp.einsum("bse,ehd->bshd", x, self.param("value", each, shape)), *"bkhd")
        y = jnp.einsum("bhqk,bkhd->bqhd", nn.softmax(jnp.einsum("bqhd,bkhd->bhqk", q, k)), v)
        out = self.param("out", box(heads, head_dim, "embed"), shape[1:] + shape[:1])
        x = named(x + jnp.einsum("bshd,hde->bse", named(y, *"bshd"), out), *"bse")
        up = self.param("up", box("embed", "mlp"), (DIM, HIDDEN))
        down = self.param("down", box("mlp", "embed"), (HIDDEN, DIM))
        x = named(x + named(nn.relu(x @ up), *"bsm") @ down, *"bse")
        return named(x @ self.param("head", box("embed", "vocab"), (DIM, VOCAB)), *"bsv")


class Mixer(nnx.Module):
    """An NNX module that names its stream in words of its own."""

    def __init__(self, rngs):
        self.embed = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.up = nnx.Linear(DIM, HIDDEN, rngs=rngs)
        self.down = nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = nn.with_logical_constraint(self.embed(tokens), ("rows", "places", "width"))
        return self.down(jp.constrain(nnx.relu(self.up(x)), "rows", "places", "inner"))


@cache
def model(words):
    return Mixer if words == "nnx" else jp.from_linen(Attention(words), jax.ShapeDtypeStruct((2, SEQ), jnp.int32))


def step_of(words, devices=None, **parallel):
    layout = jp.compose(model(words), jp.Parallel(**parallel), devices)
    return jp.train_step(layout, jp.next_token_loss, optax.sgd(0.1))


def batch():
    tokens = jax.ShapeDtypeStruct((BATCH, SEQ), np.int32)
    return {"inputs": tokens, "targets": tokens}


def flop(step):
    """Returns the FLOP of matmuls that a device makes in one step, as compiled."""
    return hardware_flop(parse(step.lower(step.abstract(), batch()).compile().as_text())).total


@cache
def whole_flop(words):
    """Returns the FLOP of the same step on one device."""
    return flop(step_of(words, jax.devices()[:1]))


class Careless(nnx.Module):
    """A stream that its author makes whole on every device, in one of several ways."""

    def __init__(self, rngs, *, how):
        self.how, self.embed = how, nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.up, self.down = nnx.Linear(DIM, HIDDEN, rngs=rngs), nnx.Linear(HIDDEN, VOCAB, rngs=rngs)

    def __call__(self, tokens):
        x = jax.nn.one_hot(tokens, VOCAB) @ self.embed.embedding[...] if self.how == "one-hot" else self.embed(tokens)
        if self.how == "by jp.constrain":
            x = jp.constrain(x, None, "seq", "embed")
        elif self.how in ("by a spec", "one-hot"):
            x = jax.lax.with_sharding_constraint(x, jax.sharding.PartitionSpec())
        elif self.how == "by Flax's names":
            x = nn.with_logical_constraint(x, (None, "seq", "embed"))
        return self.down(nnx.relu(self.up(x)))
