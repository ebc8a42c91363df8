"""Deep models as their authors write them, with the one line that lets a pipeline cut them. None names a dim.

Stacked   nnx      blocks made by `nnx.vmap` and run by `nnx.scan`, with biases and LayerNorms
Listed    nnx      GPT-2 with a list of blocks and a mask that all of them are given
Seq2seq   nnx      two stacks, of an encoder and of a decoder that attends to what the first made
ViT       linen    an encoder whose blocks are run by `nn.scan` with a length, and remat
GPT2      linen    blocks in a list of `setup`
"""

from functools import partial

import jax
import jax.numpy as jnp
from flax import linen as nn
from flax import nnx

import jaxpar as jp

VOCAB, DIM, HIDDEN, SEQ, HEADS = 32, 16, 32, 8, 4


class Block(nnx.Module):
    def __init__(self, dim, hidden, rngs, rate=0.0):
        self.ln_1, self.ln_2 = nnx.LayerNorm(dim, rngs=rngs), nnx.LayerNorm(dim, rngs=rngs)
        self.attn = nnx.MultiHeadAttention(HEADS, dim, decode=False, rngs=rngs)
        self.c_fc, self.c_proj = nnx.Linear(dim, hidden, rngs=rngs), nnx.Linear(hidden, dim, rngs=rngs)
        self.drop = nnx.Dropout(rate, rngs=rngs)

    def __call__(self, x, mask=None):
        x = x + self.attn(self.ln_1(x), mask=mask)
        return x + self.drop(self.c_proj(nnx.gelu(self.c_fc(self.ln_2(x)))))


class Stacked(nnx.Module):
    def __init__(self, layers=4, rate=0.0, *, metadata=None, rngs: nnx.Rngs):
        @nnx.split_rngs(splits=layers)
        @nnx.vmap(in_axes=(0,), out_axes=0, transform_metadata=metadata or {})
        def create_block(rngs):
            return Block(DIM, HIDDEN, rngs, rate)

        self.wte = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.wpe = nnx.Param(0.02 * jax.random.normal(rngs.params(), (SEQ, DIM)))
        self.blocks = create_block(rngs)
        self.ln_f = nnx.LayerNorm(DIM, rngs=rngs)
        self.lm_head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def layers(self, x):
        mask = nnx.make_causal_mask(jnp.ones(x.shape[:2]))

        @nnx.scan(in_axes=(0, nnx.Carry), out_axes=nnx.Carry)
        def forward(block, x):
            return block(x, mask)

        return forward(self.blocks, x)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe[...]
        x = jp.pipelined(self.layers, x)
        return self.lm_head(self.ln_f(x))


class Listed(nnx.Module):
    def __init__(self, layers=4, rate=0.0, *, rngs: nnx.Rngs):
        self.wte = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.wpe = nnx.Embed(SEQ, DIM, rngs=rngs)
        self.h = nnx.List([Block(DIM, HIDDEN, rngs, rate) for _ in range(layers)])
        self.ln_f = nnx.LayerNorm(DIM, rngs=rngs)

    def __call__(self, tokens):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        mask = nnx.make_causal_mask(tokens)
        x = jp.pipelined([partial(block, mask=mask) for block in self.h], x)
        return self.wte.attend(self.ln_f(x))


class DecoderBlock(Block):
    def __init__(self, dim, hidden, rngs):
        super().__init__(dim, hidden, rngs)
        self.cross = nnx.MultiHeadAttention(HEADS, dim, decode=False, rngs=rngs)

    def __call__(self, x, memory):
        return super().__call__(x + self.cross(x, memory))


def stacked(block, layers, rngs):
    return nnx.vmap(lambda rngs: block(DIM, HIDDEN, rngs))(rngs.fork(split=layers))


class Seq2seq(nnx.Module):
    def __init__(self, layers=2, *, rngs: nnx.Rngs):
        self.wte = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.encoder, self.decoder = stacked(Block, layers, rngs), stacked(DecoderBlock, layers, rngs)

    def encoded(self, x):
        return nnx.scan(lambda x, block: block(x), in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(x, self.encoder)

    def decoded(self, given):
        def layer(x, block):
            return block(x, given[1])

        return nnx.scan(layer, in_axes=(nnx.Carry, 0), out_axes=nnx.Carry)(given[0], self.decoder), given[1]

    def __call__(self, tokens):
        memory = self.encoded(self.wte(tokens[:, ::-1]))
        x, _ = jp.pipelined(self.decoded, (self.wte(tokens), memory))
        return self.wte.attend(x)


class Dense(nnx.Module):
    def __init__(self, dim, hidden, rngs):
        self.up, self.down = nnx.Linear(dim, hidden, rngs=rngs), nnx.Linear(hidden, dim, rngs=rngs)

    def __call__(self, x):
        return x + self.down(nnx.gelu(self.up(x)))


class DenseFirst(nnx.Module):
    def __init__(self, layers=5, *, rngs: nnx.Rngs):
        self.wte = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.h = nnx.List([Dense(DIM, 3 * DIM if i == 0 else DIM, rngs) for i in range(layers)])

    def __call__(self, tokens):
        first, *others = self.h
        return self.wte.attend(jp.pipelined(others, first(self.wte(tokens))))


class EncoderBlock(nn.Module):
    @nn.compact
    def __call__(self, x, deterministic=True):
        y = nn.MultiHeadDotProductAttention(num_heads=HEADS, deterministic=deterministic)(nn.LayerNorm()(x))
        x = x + nn.Dropout(0.0)(y, deterministic)
        y = nn.Dense(HIDDEN)(nn.LayerNorm()(x))
        return x + nn.Dense(DIM)(nn.gelu(y)), None


class Encoder(nn.Module):
    depth: int
    remat: bool = False

    @nn.compact
    def __call__(self, x, deterministic=True):
        block = nn.remat(EncoderBlock, prevent_cse=False, static_argnums=(2,)) if self.remat else EncoderBlock
        layers = nn.scan(
            block,
            variable_axes={"params": 0},
            split_rngs={"params": True, "dropout": True},
            in_axes=nn.broadcast,
            length=self.depth,
        )(name="encoderblock")
        x = jp.pipelined(lambda x: layers(x, deterministic)[0], x)
        return nn.LayerNorm(name="encoder_norm")(x)


class ViT(nn.Module):
    classes: int = 10
    patch: int = 4
    depth: int = 4

    @nn.compact
    def __call__(self, image, train=True):
        x = nn.Conv(DIM, (self.patch, self.patch), strides=self.patch, padding="VALID", name="embedding")(image)
        x = x.reshape(x.shape[0], -1, DIM)
        x = x + self.param("pos_embedding", nn.initializers.normal(0.02), (1, x.shape[1], DIM))
        x = Encoder(self.depth, remat=True, name="Transformer")(x, not train)
        return nn.Dense(self.classes, name="head")(x.mean(1))


class GPT2Block(nn.Module):
    rate: float = 0.0

    @nn.compact
    def __call__(self, x):
        mask = nn.make_causal_mask(x[..., 0])
        x = x + nn.MultiHeadDotProductAttention(num_heads=HEADS, name="attn")(nn.LayerNorm(name="ln_1")(x), mask=mask)
        y = nn.gelu(nn.Dense(HIDDEN, name="c_fc")(nn.LayerNorm(name="ln_2")(x)))
        return x + nn.Dropout(self.rate, deterministic=False)(nn.Dense(DIM, name="c_proj")(y))


class GPT2(nn.Module):
    layers: int = 4
    rate: float = 0.0

    def setup(self):
        self.wte, self.wpe = nn.Embed(VOCAB, DIM), nn.Embed(SEQ, DIM)
        self.h = [GPT2Block(self.rate) for _ in range(self.layers)]
        self.ln_f = nn.LayerNorm()

    def __call__(self, tokens, train=True):
        x = self.wte(tokens) + self.wpe(jnp.arange(tokens.shape[1]))
        x = jp.pipelined(self.h, x)
        return self.wte.attend(self.ln_f(x))
