"""Models of sequences, as their authors write them, and small. None knows of jaxpar.

Seq2seq      linen   Flax's: LSTM encoder and decoder, scanned; masked tokens; tokens drawn on the way
Sentiment    linen   Flax's SST-2: an LSTM in both directions, words left out, attention over the states
GRUTagger    nnx     `nnx.RNN` of a GRU cell, a tag for each token
WMT          linen   Flax's: encoder and decoder that share a table, packed masks, cross attention
S4D          linen   a diagonal state space, run as a convolution by FFT
Mamba        nnx     selective state space, run by `associative_scan`; a causal depthwise convolution
"""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

from published.example import ROWS, Example, context, cross_entropy, hits, language_loss, tokens


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


def translation_loss(model, batch):
    target = batch["target"]
    logits, _ = model(batch["source"], target[:, :-1], batch["length"])
    mask = target[:, 1:] != 0
    return (cross_entropy(logits, target[:, 1:]) * mask).sum(), mask.sum()


class WordDropout(nn.Module):
    rate: float

    @nn.compact
    def __call__(self, inputs, deterministic: bool):
        if deterministic:
            return inputs
        return jnp.where(jax.random.bernoulli(self.make_rng("dropout"), self.rate, inputs.shape), 0, inputs)


class Sentiment(nn.Module):
    vocab: int = 32
    features: int = 16

    @nn.compact
    def __call__(self, text, lengths, deterministic: bool = True):
        text = WordDropout(0.1)(text, deterministic)
        x = nn.Dropout(0.1)(nn.Embed(self.vocab, self.features)(text), deterministic)
        rnn = nn.Bidirectional(nn.RNN(nn.OptimizedLSTMCell(self.features)), nn.RNN(nn.OptimizedLSTMCell(self.features)))
        x = rnn(x, seq_lengths=lengths)
        scores = nn.Dense(1, use_bias=False, name="query")(jnp.tanh(nn.Dense(16, name="keys")(x)))[..., 0]
        mask = jnp.arange(text.shape[1])[None] < lengths[:, None]
        weights = nn.softmax(jnp.where(mask, scores, -1e9))
        pooled = jnp.einsum("bt,bth->bh", weights, x)
        return nn.Dense(1)(nn.tanh(nn.Dense(16)(pooled)))[:, 0]


def sentiment_loss(model, batch):
    logits = model(batch["tokens"], batch["length"], deterministic=not model.training)
    return optax.sigmoid_binary_cross_entropy(logits, batch["label"]).sum(), len(logits)


class GRUTagger(nnx.Module):
    def __init__(self, vocab=32, features=16, tags=8, *, rngs: nnx.Rngs):
        self.embed = nnx.Embed(vocab, features, rngs=rngs)
        self.rnn = nnx.RNN(nnx.GRUCell(features, features, rngs=rngs))
        self.out = nnx.Linear(features, tags, rngs=rngs)

    def __call__(self, text):
        return self.out(self.rnn(self.embed(text)))


def tagging_loss(model, batch):
    logits = model(batch["tokens"])
    losses = cross_entropy(logits, batch["tokens"] % 8)
    return {"loss": (losses.sum(), losses.size), "accuracy": hits(logits, batch["tokens"] % 8)}


class WMTBlock(nn.Module):
    """A layer of the encoder, or with what was encoded one of the decoder."""

    @nn.compact
    def __call__(self, x, mask, encoded=None, cross=None):
        attend = dict(num_heads=4, qkv_features=16, use_bias=False, dropout_rate=0.0, deterministic=True)
        y = nn.LayerNorm()(x)
        x = x + nn.MultiHeadDotProductAttention(**attend)(y, mask=mask)
        if encoded is not None:
            x = x + nn.MultiHeadDotProductAttention(**attend)(nn.LayerNorm()(x), encoded, mask=cross)
        return x + nn.Dense(16)(nn.relu(nn.Dense(32)(nn.LayerNorm()(x))))


class WMT(nn.Module):
    def setup(self):
        self.shared_embedding = nn.Embed(32, 16, embedding_init=nn.initializers.normal(1.0))
        self.encoder, self.decoder = WMTBlock(), WMTBlock()
        self.encoder_norm, self.decoder_norm = nn.LayerNorm(), nn.LayerNorm()

    def __call__(self, source, target):
        place = nn.make_attention_mask
        table = self.shared_embedding
        encoded = self.encoder_norm(self.encoder(table(source), place(source > 0, source > 0)))
        shifted = jnp.pad(target, ((0, 0), (1, 0)))[:, :-1]
        causal = nn.combine_masks(place(target > 0, target > 0), nn.make_causal_mask(target))
        x = self.decoder(table(shifted), causal, encoded, place(target > 0, source > 0))
        logits = table.attend(self.decoder_norm(x).astype(jnp.float32))
        return logits / jnp.sqrt(16)  # as logits are of a table with entries of size one


def wmt_loss(model, batch):
    target = batch["target"]
    weights = jnp.where(target > 0, 1, 0).astype(jnp.float32)
    soft = optax.smooth_labels(jax.nn.one_hot(target, 32), 0.1)
    return (optax.softmax_cross_entropy(model(batch["source"], target), soft) * weights).sum(), weights.sum()


class S4DKernel(nn.Module):
    features: int
    states: int = 8

    @nn.compact
    def __call__(self, length):
        shape = (self.features, self.states)
        log_step = self.param("log_step", nn.initializers.uniform(1.0), (self.features, 1))
        a_re = self.param("A_re", nn.initializers.constant(np.log(0.5)), shape)
        a_im = self.param(
            "A_im", lambda key, shape: jnp.pi * jnp.broadcast_to(jnp.arange(shape[1]), shape) * 1.0, shape
        )
        c = self.param("C", nn.initializers.normal(0.5**0.5), (*shape, 2))
        a = -jnp.exp(a_re) + 1j * a_im
        step = jnp.exp(log_step - 3)
        c = (c[..., 0] + 1j * c[..., 1]) * (jnp.exp(step * a) - 1) / a
        return 2 * jnp.einsum("fs,fsl->fl", c, jnp.exp((step * a)[:, :, None] * jnp.arange(length))).real


class S4D(nn.Module):
    features: int = 16
    vocab: int = 32

    @nn.compact
    def __call__(self, text):
        x = nn.Embed(self.vocab, self.features)(text)
        length = text.shape[1]
        kernel = S4DKernel(self.features)(length)
        y = nn.LayerNorm()(x)
        spectrum = jnp.fft.rfft(y, n=2 * length, axis=1) * jnp.fft.rfft(kernel, n=2 * length).T
        y = jnp.fft.irfft(spectrum, n=2 * length, axis=1)[:, :length]
        y = y + y * self.param("D", nn.initializers.ones, (self.features,))
        x = x + nn.Dense(self.features)(nn.gelu(y)) * nn.sigmoid(nn.Dense(self.features)(y))
        return nn.Dense(self.vocab)(x)


class MambaBlock(nnx.Module):
    def __init__(self, dim: int, inner: int, states: int = 4, rank: int = 4, *, rngs: nnx.Rngs):
        self.inner, self.states, self.rank = inner, states, rank
        self.norm = nnx.RMSNorm(dim, rngs=rngs)
        self.in_proj = nnx.Linear(dim, 2 * inner, use_bias=False, rngs=rngs)
        self.conv1d = nnx.Conv(inner, inner, kernel_size=(4,), padding=[(3, 0)], feature_group_count=inner, rngs=rngs)
        self.x_proj = nnx.Linear(inner, rank + 2 * states, use_bias=False, rngs=rngs)
        self.dt_proj = nnx.Linear(rank, inner, rngs=rngs)
        self.A_log = nnx.Param(jnp.log(jnp.tile(jnp.arange(1.0, states + 1), (inner, 1))))
        self.D = nnx.Param(jnp.ones(inner))
        self.out_proj = nnx.Linear(inner, dim, use_bias=False, rngs=rngs)

    def __call__(self, x):
        residual = x
        x, gate = jnp.split(self.in_proj(self.norm(x)), 2, axis=-1)
        x = nnx.silu(self.conv1d(x))
        return residual + self.out_proj(self.scan(x) * nnx.silu(gate))

    def scan(self, x):
        dt, b, c = jnp.split(self.x_proj(x), [self.rank, self.rank + self.states], axis=-1)
        dt = jax.nn.softplus(self.dt_proj(dt))
        decay = jnp.exp(jnp.einsum("bld,dn->bldn", dt, -jnp.exp(self.A_log)))
        update = jnp.einsum("bld,bln,bld->bldn", dt, b, x)

        def join(left, right):
            return left[0] * right[0], right[0] * left[1] + right[1]

        _, states = jax.lax.associative_scan(join, (decay, update), axis=1)
        return jnp.einsum("bldn,bln->bld", states, c) + x * self.D


class Mamba(nnx.Module):
    def __init__(self, vocab=32, dim=16, layers=1, *, rngs: nnx.Rngs):
        self.embedding = nnx.Embed(vocab, dim, rngs=rngs)
        self.layers = nnx.List([MambaBlock(dim, 2 * dim, rngs=rngs) for _ in range(layers)])
        self.norm_f = nnx.RMSNorm(dim, rngs=rngs)

    def __call__(self, text):
        x = self.embedding(text)
        for layer in self.layers:
            x = layer(x)
        return self.norm_f(x) @ self.embedding.embedding[...].T


def pairs(rng):
    return {
        "source": rng.integers(1, 16, [ROWS, 6]).astype(np.int32),
        "length": rng.integers(1, 7, ROWS).astype(np.int32),
        "target": (rng.integers(1, 16, [ROWS, 7]) * (np.arange(7) < rng.integers(3, 8, [ROWS, 1]))).astype(np.int32),
    }


def reviews(rng):
    return {
        **tokens(rng),
        "length": rng.integers(2, 10, ROWS).astype(np.int32),
        "label": rng.integers(0, 2, ROWS).astype(np.float32),
    }


ADAM = optax.adam(3e-3, eps=1e-4)
EXAMPLES = {
    "seq2seq": Example(
        module=Seq2seq(),
        loss=translation_loss,
        batch=pairs,
        inputs=lambda batch: (batch["source"], batch["target"], batch["length"]),
        optimizer=optax.adam(3e-3),
        streams=("sample",),
    ),
    "sentiment": Example(
        module=Sentiment(),
        loss=sentiment_loss,
        batch=reviews,
        inputs=lambda batch: (batch["tokens"], batch["length"]),
        optimizer=optax.sgd(0.1, 0.9),
    ),
    "gru": Example(module=GRUTagger, loss=tagging_loss, batch=tokens, optimizer=ADAM),
    "wmt": Example(
        module=WMT(),
        loss=wmt_loss,
        batch=pairs,
        inputs=lambda batch: (batch["source"], batch["target"]),
        optimizer=ADAM,
    ),
    "s4": Example(module=S4D(), loss=language_loss, batch=tokens, inputs=context, optimizer=ADAM),
    "mamba": Example(module=Mamba, loss=language_loss, batch=tokens, optimizer=ADAM),
}
