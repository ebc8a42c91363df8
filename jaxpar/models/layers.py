"""Layers of the reference transformers: named dims, no mesh.

Suffixes of arrays: b batch, s seq, d embed, h heads, g kv_heads, k head_dim, f mlp, v vocab.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Literal

import jax
import jax.numpy as jnp
from flax import nnx
from flax.core.spmd import get_logical_axis_rules
from jax.sharding import PartitionSpec

from jaxpar.errors import refuse

Attend = Callable[..., jax.Array]  # (q_bshk, k_bsgk, v_bsgk, *, is_causal) -> bshk


def constrain(x: jax.Array, *names: str | None) -> jax.Array:
    """Returns `x` split as the names of its dims say, where a training step gives them a meaning.

    Names that come first among the rules win where two dims ask for one mesh axis. Outside of a
    step this does nothing.

    Args:
      x: An activation.
      *names: One name, or None, for every dim.
    """
    if len(names) != x.ndim or not all(name is None or isinstance(name, str) for name in names):
        raise refuse(
            f"constrain(x of shape {list(x.shape)}, {', '.join(map(repr, names))})",
            rule="every dim has one name, or None",
            fix=f"constrain(x, {', '.join(map(repr, (*names, *(None,) * x.ndim)[: x.ndim]))})",
        )
    spec = _spec(names)
    return x if spec is None else jax.lax.with_sharding_constraint(x, spec)


def _spec(names: tuple[str | None, ...]) -> PartitionSpec | None:
    """Returns what the rules of a step make of the names of an activation's dims; None outside of a step."""
    rules = get_logical_axis_rules()
    if not rules:
        return None
    dims: list = [None] * len(names)
    taken: set[str] = set()
    for name, axes in rules:
        if name in names and axes is not None and dims[names.index(name)] is None:
            wanted = (axes,) if isinstance(axes, str) else tuple(axes)
            if not taken.intersection(wanted):
                dims[names.index(name)] = axes
                taken.update(wanted)
    return PartitionSpec(*dims)


_QUERIES = ("batch", "seq", "heads", "head_dim")
_OWN = ("batch", "seq", "kv_heads", "head_dim")
_WHOLE = ("batch", "keys", "kv_heads", "head_dim")


def gathered(x_bsgk: jax.Array) -> jax.Array:
    """Returns keys or values of whole sequences, where devices have pieces of them; else `x_bsgk` itself.

    Their gradient goes straight back to the pieces: left to itself JAX has it whole first, which is an all-reduce where
    a reduce-scatter would do.
    """
    own, whole = _spec(_OWN), _spec(_WHOLE)
    return x_bsgk if own == whole else _moved(x_bsgk, whole, own)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, there: PartitionSpec, back: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, there)


_moved.defvjp(
    lambda x, there, back: (_moved(x, there, back), None),
    lambda there, back, _, gradient: (jax.lax.with_sharding_constraint(gradient, back),),
)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str, ...], scale: float) -> nnx.Param:
    """Returns a normally distributed parameter with named dims; `scale` is its standard deviation."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape), out_sharding=names)


def bias(use: bool, shape: tuple[int, ...], names: tuple[str, ...]) -> nnx.Param | None:
    """Returns a parameter of zeros, or None where the model has no biases."""
    return nnx.Param(jnp.zeros(shape), out_sharding=names) if use else None


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Returns `x` with entries dropped at that rate and the others scaled up; unchanged without a key."""
    if key is None or rate == 0.0:
        return x
    keep = jax.random.bernoulli(key, 1 - rate, x.shape)
    return jnp.where(keep, x / (1 - rate), 0).astype(x.dtype)


class Norm(nnx.Module):
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm, in float32."""

    def __init__(self, dim: int, *, kind: Literal["rms", "layer"], eps: float = 1e-5):
        self.kind, self.eps = kind, eps
        self.scale = nnx.Param(jnp.ones((dim,)), out_sharding=("embed",))
        self.bias = bias(kind == "layer", (dim,), ("embed",))

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns x [..., dim] normalized over its last dim."""
        y = x.astype(jnp.float32)
        if self.kind == "layer":
            y = y - jnp.mean(y, axis=-1, keepdims=True)
        y = y * jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + self.eps)
        y = y.astype(x.dtype) * self.scale[...]
        return y if self.bias is None else y + self.bias[...]


@dataclass(frozen=True)
class Rope:
    """How fast the pairs of a head turn from position to position (RoPE, Su et al. 2021, arXiv:2104.09864).

    Attributes:
      base: Pair i of n turns by base ** (-i / n), in radians.
      stretch: (factor, low, high, seq): pairs that turn less than `low` times within seq positions turn `factor` times
        slower, those that turn more than `high` times as they did, the others in between. () leaves all as they are.
        Llama 3.1 (arXiv:2407.21783) has (8, 1, 4, 8192).
    """

    base: float
    stretch: tuple[float, ...] = ()

    def frequencies(self, pairs: int) -> jax.Array:
        """Returns radians per position. Shape [pairs], float32."""
        found = self.base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
        if not self.stretch:
            return found
        factor, low, high, seq = self.stretch
        kept = jnp.clip((seq * found / (2 * math.pi) - low) / (high - low), 0, 1)
        return found * (kept + (1 - kept) / factor)


def rotate(x_bshk: jax.Array, rope: Rope) -> jax.Array:
    """Returns queries or keys turned by their position.

    Pairs are (i, i + head_dim / 2), as in the released Llama weights.
    """
    frequency = rope.frequencies(x_bshk.shape[-1] // 2)
    angle = jnp.arange(x_bshk.shape[1], dtype=jnp.float32)[:, None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_bshk.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_bshk.dtype)


def attend(q_bshk: jax.Array, k_bsgk: jax.Array, v_bsgk: jax.Array, *, is_causal: bool) -> jax.Array:
    """Returns softmax(q k / sqrt(head_dim)) v; with cuDNN's fused kernel on NVIDIA GPUs in 16 bits.

    That kernel takes whole sequences: with context parallelism scores are kept, in float32.
    """
    low = q_bshk.dtype in (jnp.bfloat16, jnp.float16)
    if low and _spec(_OWN) != _spec(_WHOLE):
        return _attend_pieces(q_bshk, k_bsgk, v_bsgk, is_causal=is_causal)
    fused = "cudnn" if low and jax.default_backend() == "gpu" else None
    return jax.nn.dot_product_attention(q_bshk, k_bsgk, v_bsgk, is_causal=is_causal, implementation=fused)


def _attend_pieces(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, is_causal: bool) -> jax.Array:
    """Returns the same in 16 bits, for queries s of keys t; all its products run in them, backward too."""
    b, s, heads, head_dim = q_bshk.shape
    t, groups = k_btgk.shape[1:3]
    scores = _scores(q_bshk.reshape(b, s, groups, heads // groups, head_dim), k_btgk) / math.sqrt(head_dim)
    if is_causal:
        seen = jnp.arange(s)[:, None] >= jnp.arange(t)
        scores = jnp.where(seen, scores, -0.5 * jnp.finfo(jnp.float32).max)
    shares = jax.nn.softmax(scores, axis=-1).astype(q_bshk.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", shares, v_btgk).reshape(q_bshk.shape)


@jax.custom_vjp
def _scores(q_bsgrk: jax.Array, k_btgk: jax.Array) -> jax.Array:
    """Returns q k in float32; its gradient is rounded before the products that take it, as in fused kernels.

    Left to JAX these have one operand in float32, which halves their speed and doubles what keys' gradients send.
    """
    return jnp.einsum("bsgrk,btgk->bgrst", q_bsgrk, k_btgk, preferred_element_type=jnp.float32)


def _scores_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = kept
    gradient = gradient.astype(q.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", gradient, k), jnp.einsum("bgrst,bsgrk->btgk", gradient, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


@dataclass(frozen=True, kw_only=True)
class BlockSettings:
    """Shape and kind of a transformer layer.

    Attributes:
      dim: Width of the stream.
      heads: Attention heads.
      kv_heads: Heads of keys and values.
      hidden: Width of the feed-forward.
      norm: rms or layer.
      gated: SwiGLU in the feed-forward, else GELU.
      use_bias: Biases on every matrix.
      rope: Rotary positions, or None.
      causal: Whether a token sees only those before it.
      dropout: Rate, where a key is given.
      out_scale: Scale of the initial matrices that write to the stream, 1 / sqrt(2 layers) in GPT-2.
      norm_eps: What the norms add to the mean square.
      attend: How attention is computed.
    """

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    norm: Literal["rms", "layer"]
    gated: bool
    use_bias: bool
    rope: Rope | None
    causal: bool
    dropout: float
    out_scale: float
    norm_eps: float = 1e-5
    attend: Attend = attend


class Attention(nnx.Module):
    """Multi-head attention, grouped-query where `kv_heads` < `heads` (arXiv:2305.13245)."""

    def __init__(self, s: BlockSettings, *, rngs: nnx.Rngs):
        head_dim, scale = s.dim // s.heads, 1 / math.sqrt(s.dim)
        self.settings = s
        self.query = weight(rngs, (s.dim, s.heads, head_dim), ("embed", "heads", "head_dim"), scale)
        self.key = weight(rngs, (s.dim, s.kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), scale)
        self.value = weight(rngs, (s.dim, s.kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), scale)
        self.out = weight(rngs, (s.heads, head_dim, s.dim), ("heads", "head_dim", "embed"), scale * s.out_scale)
        self.query_bias = bias(s.use_bias, (s.heads, head_dim), ("heads", "head_dim"))
        self.key_bias = bias(s.use_bias, (s.kv_heads, head_dim), ("kv_heads", "head_dim"))
        self.value_bias = bias(s.use_bias, (s.kv_heads, head_dim), ("kv_heads", "head_dim"))
        self.out_bias = bias(s.use_bias, (s.dim,), ("embed",))

    def __call__(self, x_bsd: jax.Array) -> jax.Array:
        """Returns [batch, seq, dim]."""
        # named as soon as they exist, so that under sequence parallelism the stream is gathered and not the weights
        q = constrain(jnp.einsum("bsd,dhk->bshk", x_bsd, self.query[...]), *_QUERIES)
        k = constrain(jnp.einsum("bsd,dgk->bsgk", x_bsd, self.key[...]), *_OWN)
        v = constrain(jnp.einsum("bsd,dgk->bsgk", x_bsd, self.value[...]), *_OWN)
        q, k, v = _plus(q, self.query_bias), _plus(k, self.key_bias), _plus(v, self.value_bias)
        if self.settings.rope is not None:
            q, k = rotate(q, self.settings.rope), rotate(k, self.settings.rope)
        y = self.settings.attend(q, gathered(k), gathered(v), is_causal=self.settings.causal)
        y = constrain(y, *_QUERIES)
        return _plus(jnp.einsum("bshk,hkd->bsd", y, self.out[...]), self.out_bias)


class FeedForward(nnx.Module):
    """Two matrices with GELU between them, or three with SiLU gating (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, s: BlockSettings, *, rngs: nnx.Rngs):
        self.up = weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), 1 / math.sqrt(s.dim))
        self.gate = weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), 1 / math.sqrt(s.dim)) if s.gated else None
        self.down = weight(rngs, (s.hidden, s.dim), ("mlp", "embed"), s.out_scale / math.sqrt(s.hidden))
        self.up_bias = bias(s.use_bias, (s.hidden,), ("mlp",))
        self.gate_bias = bias(s.use_bias and s.gated, (s.hidden,), ("mlp",))
        self.down_bias = bias(s.use_bias, (s.dim,), ("embed",))

    def __call__(self, x_bsd: jax.Array) -> jax.Array:
        """Returns [batch, seq, dim]."""
        h = constrain(jnp.einsum("bsd,df->bsf", x_bsd, self.up[...]), "batch", "seq", "mlp")
        h = _plus(h, self.up_bias)
        if self.gate is None:
            h = jax.nn.gelu(h)
        else:
            gate = constrain(jnp.einsum("bsd,df->bsf", x_bsd, self.gate[...]), "batch", "seq", "mlp")
            h = jax.nn.silu(_plus(gate, self.gate_bias)) * h
        return _plus(jnp.einsum("bsf,fd->bsd", h, self.down[...]), self.down_bias)


class Block(nnx.Module):
    """A pre-norm transformer layer: attention, then the feed-forward, each added to the stream."""

    def __init__(self, s: BlockSettings, *, rngs: nnx.Rngs):
        self.rate = s.dropout
        self.norm_attention = Norm(s.dim, kind=s.norm, eps=s.norm_eps)
        self.attention = Attention(s, rngs=rngs)
        self.norm_mlp = Norm(s.dim, kind=s.norm, eps=s.norm_eps)
        self.mlp = FeedForward(s, rngs=rngs)

    def __call__(self, x_bsd: jax.Array, key: jax.Array | None) -> jax.Array:
        """Returns [batch, seq, dim]; without a key nothing is dropped."""
        keys = (None, None) if key is None else jax.random.split(key)
        x_bsd = x_bsd + dropout(self.attention(self.norm_attention(x_bsd)), self.rate, keys[0])
        x_bsd = constrain(x_bsd, "batch", "seq", "embed")
        x_bsd = x_bsd + dropout(self.mlp(self.norm_mlp(x_bsd)), self.rate, keys[1])
        return constrain(x_bsd, "batch", "seq", "embed")


def _plus(x: jax.Array, offset: nnx.Param | None) -> jax.Array:
    return x if offset is None else x + offset[...]
