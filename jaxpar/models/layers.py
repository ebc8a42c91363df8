"""Layers of the reference transformers: dim names, no mesh.

Suffixes of arrays: b batch, s seq, d embed, h heads, g kv_heads, k head_dim, f mlp, v vocab.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.blocks.masks import ONE, Documents, apply_layer
from jaxpar.models.cache import LayerCache
from jaxpar.models.custom_gradients import normalize, swiglu, unmerged_input
from jaxpar.models.dim_names import constrain
from jaxpar.models.islands import KEYS, QUERIES, attention

# Rotary position embeddings.


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings (Su et al. 2021, arXiv:2104.09864).

    Attributes:
      base: Pair i of n rotates by base ** (-i / n) radians per position.
      stretch: (factor, low, high, seq): pairs that turn less than `low` times within seq positions rotate `factor`
        times slower, pairs that turn more than `high` times are unchanged, other pairs are interpolated. () changes
        nothing. Llama 3.1 (arXiv:2407.21783) has (8, 1, 4, 8192).
    """

    base: float
    stretch: tuple[float, ...] = ()

    def frequencies(self, pairs: int) -> jax.Array:
        """Radians per position. Shape [pairs], float32."""
        frequency = self.base ** (-jnp.arange(pairs, dtype=jnp.float32) / pairs)
        if not self.stretch:
            return frequency
        factor, low, high, seq = self.stretch
        unscaled_share = jnp.clip((seq * frequency / (2 * math.pi) - low) / (high - low), 0, 1)
        return frequency * (unscaled_share + (1 - unscaled_share) / factor)


def rotate(x_bshk: jax.Array, rope: Rope, positions_bs: jax.Array | None = None) -> jax.Array:
    """Rotates queries or keys by their position.

    Pairs are (i, i + head_dim / 2), as in the released Llama weights.

    Args:
      x_bshk: Queries or keys.
      rope: The rotary embedding.
      positions_bs: Positions of the tokens; 0, 1, 2, ... along a row by default.
    """
    frequency = rope.frequencies(x_bshk.shape[-1] // 2)
    pos = jnp.arange(x_bshk.shape[1], dtype=jnp.float32) if positions_bs is None else positions_bs.astype(jnp.float32)
    angle = pos[..., None, None] * frequency
    cos, sin = jnp.cos(angle), jnp.sin(angle)
    a, b = jnp.split(x_bshk.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x_bshk.dtype)


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str | None, ...], scale: float) -> nnx.Param:
    """A normally distributed parameter with dim names; `scale` is its standard deviation."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape), out_sharding=names)


def bias(use: bool, shape: tuple[int, ...], names: tuple[str, ...]) -> nnx.Param | None:
    """A parameter of zeros, or None if the model has no biases."""
    return nnx.Param(jnp.zeros(shape), out_sharding=names) if use else None


def dropout(x: jax.Array, rate: float, key: jax.Array | None) -> jax.Array:
    """Sets entries of `x` to 0 with probability `rate` and scales up the others; the identity without a key."""
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

    def __call__(self, x: jax.Array, *, looped: bool = False) -> jax.Array:
        """Normalizes x [..., dim] over its last dim; `looped`: whether `x` is computed in a loop."""
        y: Any = normalize(x, self.scale[...], self.eps, self.kind == "layer", looped)
        return y if self.bias is None else y + self.bias[...]


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Shape and kind of a transformer block.

    Attributes:
      dim: Width of the stream.
      heads: Attention heads.
      kv_heads: Heads of keys and values.
      hidden: Width of the feed-forward.
      norm: rms or layer.
      gated: SwiGLU in the feed-forward, else GELU.
      use_bias: Biases on every matrix.
      rope: Rotary positions, or None.
      causal: Whether a token attends only to itself and earlier tokens.
      dropout: Dropout rate, if a key is given.
      out_scale: Factor of the initial values of matrices that write to the stream, 1 / sqrt(2 layers) in GPT-2.
      norm_eps: Epsilon that the norms add to the mean square.
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


class Attention(nnx.Module):
    """Multi-head attention, grouped-query where `kv_heads` < `heads` (arXiv:2305.13245)."""

    def __init__(self, s: BlockConfig, *, rngs: nnx.Rngs):
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

    def __call__(self, x_bsd: jax.Array, documents: Documents = ONE) -> jax.Array:
        """Attention output [batch, seq, dim]; a token attends only to tokens of its document."""
        projected = self._project(x_bsd, documents.positions)
        y = attention(*projected, causal=self.settings.causal, segments=documents.segments)
        return self._project_out(y)

    def cached(self, x_bsd: jax.Array, layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        """Attention with a KV cache. Returns the output [batch, seq, dim] and the updated cache."""
        y, layer = layer.attend(*self._project(x_bsd, layer.positions))
        return self._project_out(y), layer

    def _project(self, x_bsd: jax.Array, positions: jax.Array | None = None) -> tuple[jax.Array, ...]:
        # constrained as soon as they exist, so that sequence parallelism gathers the stream and not the weights
        q = constrain(jnp.einsum("bsd,dhk->bshk", x_bsd, self.query[...]), *QUERIES)
        k = constrain(jnp.einsum("bsd,dgk->bsgk", x_bsd, self.key[...]), *KEYS)
        v = constrain(jnp.einsum("bsd,dgk->bsgk", x_bsd, self.value[...]), *KEYS)
        q, k, v = _add_bias(q, self.query_bias), _add_bias(k, self.key_bias), _add_bias(v, self.value_bias)
        if self.settings.rope is not None:
            q, k = rotate(q, self.settings.rope, positions), rotate(k, self.settings.rope, positions)
        return q, k, v

    def _project_out(self, y: jax.Array) -> jax.Array:
        y = constrain(y, *QUERIES)
        return _add_bias(jnp.einsum("bshk,hkd->bsd", y, self.out[...]), self.out_bias)


class FeedForward(nnx.Module):
    """Two matrices with GELU between them, or three with SiLU gating (SwiGLU, arXiv:2002.05202)."""

    def __init__(self, s: BlockConfig, *, rngs: nnx.Rngs):
        self.up = weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), 1 / math.sqrt(s.dim))
        self.gate = weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), 1 / math.sqrt(s.dim)) if s.gated else None
        self.down = weight(rngs, (s.hidden, s.dim), ("mlp", "embed"), s.out_scale / math.sqrt(s.hidden))
        self.up_bias = bias(s.use_bias, (s.hidden,), ("mlp",))
        self.gate_bias = bias(s.use_bias and s.gated, (s.hidden,), ("mlp",))
        self.down_bias = bias(s.use_bias, (s.dim,), ("embed",))

    def __call__(self, x_bsd: jax.Array) -> jax.Array:
        """Returns [batch, seq, dim]."""
        # up and gate are sharded by columns and down by rows: one sum over `tensor` for the three (Megatron's pair)
        h = constrain(jnp.einsum("bsd,df->bsf", x_bsd, self.up[...]), "batch", "seq", "mlp")
        h = _add_bias(h, self.up_bias)
        if self.gate is None:
            h = jax.nn.gelu(h)
        else:
            gate = constrain(jnp.einsum("bsd,df->bsf", unmerged_input(x_bsd), self.gate[...]), "batch", "seq", "mlp")
            h = swiglu(_add_bias(gate, self.gate_bias), h)
        return _add_bias(jnp.einsum("bsf,fd->bsd", h, self.down[...]), self.down_bias)


class Block(nnx.Module):
    """A pre-norm transformer layer: attention, then the feed-forward, each added to the stream."""

    def __init__(self, s: BlockConfig, mlp: Callable[..., nnx.Module] = FeedForward, *, rngs: nnx.Rngs):
        self.rate = s.dropout
        self.norm_attention = Norm(s.dim, kind=s.norm, eps=s.norm_eps)
        self.attention = Attention(s, rngs=rngs)
        self.norm_mlp = Norm(s.dim, kind=s.norm, eps=s.norm_eps)
        self.mlp: Any = mlp(s, rngs=rngs)

    def __call__(self, x_bsd: jax.Array, key: jax.Array | None, documents: Documents = ONE) -> jax.Array:
        """Output [batch, seq, dim]; no dropout without a key."""
        keys = (None, None) if key is None else jax.random.split(key)
        return self._add_residuals(x_bsd, self.attention(self.norm_attention(x_bsd), documents), keys)

    def on_stream(self, stream: jax.Array | dict, key: jax.Array | None) -> Any:
        """Applies the block to a stream, which may have documents: see `Documents.attach`."""
        return apply_layer(lambda x, documents: self(x, key, documents), stream)

    def cached(self, x_bsd: jax.Array, layer: LayerCache) -> tuple[jax.Array, LayerCache]:
        """The block with a KV cache. Returns the output [batch, seq, dim] and the updated cache."""
        y, layer = self.attention.cached(self.norm_attention(x_bsd), layer)
        return self._add_residuals(x_bsd, y, (None, None)), layer

    def _add_residuals(self, x_bsd: jax.Array, y_bsd: jax.Array, keys: jax.Array | tuple[None, None]) -> jax.Array:
        """Adds attention's output to the stream, then the feed-forward's."""
        x_bsd = x_bsd + dropout(y_bsd, self.rate, keys[0])
        # attention's output is a sum over `tensor`: constrained here, it is a reduce-scatter in sequence parallelism
        x_bsd = constrain(x_bsd, "batch", "seq", "embed")
        x_bsd = x_bsd + dropout(self.mlp(self.norm_mlp(x_bsd)), self.rate, keys[1])
        return constrain(x_bsd, "batch", "seq", "embed")


def _add_bias(x: jax.Array, offset: nnx.Param | None) -> jax.Array:
    return x if offset is None else x + offset[...]
