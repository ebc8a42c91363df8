"""Language models with mixtures of experts as users write them, in NNX and Linen, and the mixture in plain loops."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
from flax import linen as nn
from flax import nnx

import jaxpar as jp

EXPERTS, K, DIM, HIDDEN, VOCAB, SEQ = 8, 2, 16, 32, 32, 12


def gated(params, x):
    """One expert: SwiGLU."""
    return (nnx.silu(x @ params["gate"]) * (x @ params["up"])) @ params["down"]


def routed(logits, spare):
    chances = jax.nn.softmax(logits.astype(jnp.promote_types(logits.dtype, jnp.float32)))
    weights, choices = jax.lax.top_k(chances, K + spare)
    weights = weights[..., :K]
    return choices, weights / weights.sum(-1, keepdims=True), chances


def balance(chances, choices):
    """The auxiliary loss of each row: experts x sum of (share of first choices x mean chance) (Switch)."""
    share = jax.nn.one_hot(choices[..., 0], EXPERTS).mean(1)
    return EXPERTS * (share * chances.mean(1)).sum(-1)


class Mixture(nnx.Module):
    """A feed-forward layer of experts."""

    def __init__(self, spare, bound, rngs):
        def weight(shape, names):
            return nnx.Param(jax.random.normal(rngs.params(), shape) / 4, out_sharding=names)

        self.spare, self.bound = spare, bound
        self.router = nnx.Linear(DIM, EXPERTS, use_bias=False, rngs=rngs)
        self.gate = weight((EXPERTS, DIM, HIDDEN), ("expert", "embed", "mlp"))
        self.up = weight((EXPERTS, DIM, HIDDEN), ("expert", "embed", "mlp"))
        self.down = weight((EXPERTS, HIDDEN, DIM), ("expert", "mlp", "embed"))

    def __call__(self, x, counted):
        choices, weights, chances = routed(self.router(x) * 4, self.spare)
        params = {"gate": self.gate[...], "up": self.up[...], "down": self.down[...]}
        y, load = jp.mixture(gated, params, x, choices, weights, counted=counted, **self.bound)
        return y, balance(chances, choices), load


class Model(nnx.Module):
    """Two layers of recurrence-free mixing and experts."""

    def __init__(self, rngs, spare=0, layers=2, **bound):
        self.words = nnx.Embed(VOCAB, DIM, rngs=rngs)
        self.mixing = nnx.List([nnx.Linear(DIM, DIM, rngs=rngs) for _ in range(layers)])
        self.mixtures = nnx.List([Mixture(spare, bound, rngs) for _ in range(layers)])
        self.head = nnx.Linear(DIM, VOCAB, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        x, auxiliary, loads = jp.constrain(self.words(tokens), "batch", "seq", "embed"), 0.0, []
        for mixing, experts in zip(self.mixing, self.mixtures, strict=True):
            past = jnp.cumsum(mixing(x), axis=1) / jnp.arange(1, tokens.shape[1] + 1)[:, None]
            y, of_layer, load = experts(x + past, tokens > 0)
            x, auxiliary = jp.constrain(x + past + y, "batch", "seq", "embed"), auxiliary + of_layer
            loads.append(load)
        return self.head(x), auxiliary, loads


class LinenMixture(nn.Module):
    """The same layer in Linen, whose parameters have no names."""

    capacity: float | None = None
    spare: int = 0

    @nn.compact
    def __call__(self, x):
        chances = nn.Dense(EXPERTS, use_bias=False, name="router")(x)
        choices, weights, chances = routed(chances * 4, self.spare)
        init = nn.initializers.normal(0.25)
        params = {
            "gate": self.param("gate", init, (EXPERTS, DIM, HIDDEN)),
            "up": self.param("up", init, (EXPERTS, DIM, HIDDEN)),
            "down": self.param("down", init, (EXPERTS, HIDDEN, DIM)),
        }
        y, load = jp.mixture(gated, params, x, choices, weights, capacity=self.capacity)
        return x + y, balance(chances, choices), load


class LinenModel(nn.Module):
    capacity: float | None = None
    spare: int = 0

    @nn.compact
    def __call__(self, tokens):
        x = nn.Embed(VOCAB, DIM)(tokens)
        x = x + nn.MultiHeadDotProductAttention(2, use_bias=False)(nn.LayerNorm()(x), mask=nn.make_causal_mask(tokens))
        x, auxiliary, load = LinenMixture(self.capacity, self.spare, name="experts")(x)
        return nn.Dense(VOCAB, use_bias=False)(x), auxiliary, [load]


def loss(model, batch):
    """Next tokens, with the auxiliary loss of each row; and how many choices were dropped and spilled."""
    logits, auxiliary, loads = model(batch["inputs"])
    losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["targets"])
    count = losses.size
    total = {name: sum(getattr(load, name).sum() for load in loads) for name in ("sent", "kept", "spilled", "dropped")}
    rows = batch["inputs"].shape[0]
    return {"loss": (losses.sum() + 0.01 * auxiliary.sum() * losses.shape[1], count)} | {
        name: (value.astype(jnp.float32), jnp.float32(rows)) for name, value in total.items()
    }


def batch_of(rows=16, seq=SEQ):
    numbers = np.random.default_rng(0)
    words = (numbers.zipf(1.3, (rows, seq)) % VOCAB).astype(np.int32)
    return {"inputs": words, "targets": np.roll(words, -1, axis=1)}


def by_hand(params, x, choices, weights, capacity, sharing=1):
    """The mixture of one row in loops over choices and tokens, with numpy: (sums, sent, kept, spilled, dropped).

    `capacity` is that of a buffer, which `sharing` experts share.
    """
    tokens, k = weights.shape
    experts = len(params["up"])
    taken, expert_of = np.zeros(experts // sharing, int), np.full((tokens, k), -1)
    counts = {name: np.zeros(experts, int) for name in ("sent", "kept", "spilled", "dropped")}
    for j in range(k):
        for s in range(tokens):
            e = choices[s, j]
            if e < experts:
                counts["sent"][e] += 1
                if taken[e // sharing] < capacity:
                    taken[e // sharing] += 1
                    expert_of[s, j] = e
                    counts["kept"][e] += 1
    for j in range(k, choices.shape[1]):
        for s in range(tokens):
            lacking = [i for i in range(k) if expert_of[s, i] < 0 and choices[s, i] < experts]
            e = choices[s, j]
            if lacking and taken[e // sharing] < capacity:
                taken[e // sharing] += 1
                expert_of[s, lacking[0]] = e
                counts["spilled"][choices[s, lacking[0]]] += 1
    counts["dropped"] = counts["sent"] - counts["kept"] - counts["spilled"]
    y = np.zeros_like(x)
    for s in range(tokens):
        for j in range(k):
            if (e := expert_of[s, j]) >= 0:
                h = x[s] @ params["gate"][e]
                y[s] += weights[s, j] * ((h / (1 + np.exp(-h)) * (x[s] @ params["up"][e])) @ params["down"][e])
    return y, counts
