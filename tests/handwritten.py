"""Language models as users write them: Flax's own layers, names for dims, and none of jaxpar's modules or remedies.

Transformer  attention over the whole sequence, a gated MLP, a head of its own
Shifting     each token mixed with the one before it, as RWKV and causal convolutions do; tied embedding
Looking      tables of its own that are looked up: positions before the layers, a bucketed relative bias inside of them

`one_hot` compares every entry of the vocabulary with the label; `looked_up` picks the label's out, as optax does.
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import nnx

import jaxpar as jp

VOCAB, DIM, HEADS, HIDDEN, SEQ, BATCH, LAYERS = 32, 16, 4, 32, 8, 16, 8


def _named(*names):
    return nnx.with_partitioning(nnx.initializers.lecun_normal(), names)


def _linear(rows, columns, names, rngs):
    return nnx.Linear(rows, columns, use_bias=False, kernel_init=_named(*names), rngs=rngs)


def _param(init, shape, names, rngs):
    return nnx.Param(nnx.with_partitioning(init, names)(rngs.params(), shape))


def _norm(rngs):
    return nnx.RMSNorm(DIM, scale_init=nnx.with_partitioning(nnx.initializers.ones, ("norm",)), rngs=rngs)


class Attention(nnx.Module):
    def __init__(self, rngs):
        self.norm = _norm(rngs)
        self.query, self.key, self.value = (_linear(DIM, DIM, ("embed", "heads"), rngs) for _ in range(3))
        self.out = _linear(DIM, DIM, ("heads", "embed"), rngs)

    def __call__(self, x, bias=0.0):
        x = self.norm(x)
        query, key, value = (
            jp.constrain(made(x).reshape(*x.shape[:2], HEADS, -1), "batch", None, "heads", None)
            for made in (self.query, self.key, self.value)
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) * (DIM // HEADS) ** -0.5 + bias
        seen = jnp.tril(jnp.ones((x.shape[1], x.shape[1]), bool))
        weights = jax.nn.softmax(jnp.where(seen, scores, -1e30), axis=-1)
        return self.out(jnp.einsum("bhqk,bkhd->bqhd", weights, value).reshape(x.shape))


class Mlp(nnx.Module):
    def __init__(self, rngs):
        self.norm = _norm(rngs)
        self.gate, self.up = (_linear(DIM, HIDDEN, ("embed", "mlp"), rngs) for _ in range(2))
        self.down = _linear(HIDDEN, DIM, ("mlp", "embed"), rngs)

    def __call__(self, x):
        x = self.norm(x)
        return self.down(jp.constrain(nnx.silu(self.gate(x)) * self.up(x), "batch", "seq", "mlp"))


class Block(nnx.Module):
    def __init__(self, rngs):
        self.attention, self.mlp = Attention(rngs), Mlp(rngs)

    def __call__(self, x):
        x = x + self.attention(x)
        return x + self.mlp(x)


class ShiftingBlock(nnx.Module):
    def __init__(self, rngs):
        self.mix = _param(nnx.initializers.uniform(1.0), (DIM,), ("embed",), rngs)
        self.mlp = Mlp(rngs)

    def __call__(self, x):
        before = jnp.concatenate([jnp.zeros_like(x[:, :1]), x[:, :-1]], axis=1)
        mix = self.mix[...]
        return x + self.mlp(mix * x + (1 - mix) * before)


class LookingBlock(nnx.Module):
    def __init__(self, rngs):
        self.attention, self.mlp = Attention(rngs), Mlp(rngs)
        self.bias = _param(nnx.initializers.normal(0.1), (4, HEADS), (None, "heads"), rngs)

    def __call__(self, x):
        place = jnp.arange(x.shape[1])
        buckets = jnp.minimum(jnp.abs(place[:, None] - place[None, :]), 3)
        bias = self.bias[...][buckets]  # [query, key, heads]
        x = x + self.attention(x, jnp.moveaxis(bias, -1, 0)[None])
        return x + self.mlp(x)


class Language(nnx.Module):
    """Tokens [batch, seq] to logits [batch, seq, vocab], with layers of some kind between."""

    block = Block
    tied = False

    def __init__(self, rngs):
        @nnx.split_rngs(splits=LAYERS)
        @nnx.vmap(in_axes=0, out_axes=0, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def made(rngs):
            return self.block(rngs)

        self.embed = nnx.Embed(VOCAB, DIM, embedding_init=_named("vocab", "embed"), rngs=rngs)
        self.blocks = made(rngs)
        self.norm = nnx.LayerNorm(DIM, rngs=rngs)
        self.head = None if self.tied else _linear(DIM, VOCAB, ("embed", "vocab"), rngs)

    def embedded(self, tokens):
        return self.embed(tokens)

    def layers(self, x):
        @nnx.scan(in_axes=(nnx.Carry, 0), out_axes=nnx.Carry, transform_metadata={nnx.PARTITION_NAME: "layers"})
        def each(x, block):
            return jp.constrain(block(x), "batch", "seq", "embed")

        return each(x, self.blocks)

    def __call__(self, tokens):
        x = jp.constrain(self.embedded(tokens), "batch", "seq", "embed")
        x = self.norm(jp.pipelined(self.layers, x))
        return self.embed.attend(x) if self.head is None else self.head(x)


class Transformer(Language):
    pass


class Shifting(Language):
    block = ShiftingBlock
    tied = True


class Looking(Language):
    block = LookingBlock

    def __init__(self, rngs):
        super().__init__(rngs)
        self.positions = nnx.Embed(SEQ, DIM, embedding_init=_named("positions", "embed"), rngs=rngs)

    def embedded(self, tokens):
        before = jnp.cumsum(tokens % 4 == 0, axis=1) % SEQ  # a token's place among some of them: another in every row
        return self.embed(tokens) + self.positions(before)


def one_hot(model, batch):
    logits = model(batch["inputs"])
    labels = jax.nn.one_hot(batch["targets"], VOCAB, dtype=logits.dtype)
    losses = -jnp.sum(jax.nn.log_softmax(logits) * labels, axis=-1)
    return jnp.sum(losses), losses.size


def looked_up(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return jnp.sum(losses), losses.size


def batches(count):
    rng = np.random.default_rng(0)
    for _ in range(count):
        tokens = rng.integers(0, VOCAB, (BATCH, SEQ + 1)).astype(np.int32)
        yield {"inputs": tokens[:, :-1], "targets": tokens[:, 1:]}


MODELS = {"transformer": Transformer, "shifting": Shifting, "looking": Looking}
LOSSES = {"one-hot": one_hot, "looked up": looked_up}
