"""Layers of the reference transformers: dim names, no mesh.

Suffixes of arrays: b batch, s seq, d embed, h heads, g kv_heads, k head_dim, f mlp, v vocab.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from jaxpar.models.blocks.attention_mask import ONE, Documents, apply_layer
from jaxpar.models.cache import LayerCache
from jaxpar.models.custom_gradients import activate, geglu, normalize, swiglu, unmerged_input
from jaxpar.models.dim_names import constrain
from jaxpar.models.islands import KEYS, QUERIES, attention
from jaxpar.models.rotary import Rope, rotate
from jaxpar.models.settings.decoder import Activation, BiasedPart, NormKind, NormPosition, QueryKeyNorm


def weight(rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str | None, ...], scale: float) -> nnx.Param:
    """A normally distributed parameter with dim names; `scale` is its standard deviation."""
    return nnx.Param(scale * jax.random.normal(rngs.params(), shape), out_sharding=names)


def padded_weight(
    rngs: nnx.Rngs, shape: tuple[int, ...], names: tuple[str | None, ...], scale: float, *, dim: int, size: int
) -> nnx.Param:
    """`weight`, with zeros up to `size` along a dim: the values are those without."""
    value = weight(rngs, shape, names, scale)[...]
    return nnx.Param(
        jnp.pad(value, [(0, size - n if i == dim else 0) for i, n in enumerate(shape)]), out_sharding=names
    )


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
    """RMSNorm (Zhang and Sennrich 2019, arXiv:1910.07467) or LayerNorm, in float32.

    A zero-centered RMSNorm multiplies by 1 + its scale, which is 0 at first. A non-parametric LayerNorm has no scale
    and no bias (OLMo, arXiv:2402.00838).
    """

    def __init__(self, shape: int | tuple[int, ...], *, kind: NormKind, eps: float = 1e-5, names=("embed",)):
        shape = (shape,) if isinstance(shape, int) else shape
        self.kind, self.eps = kind, eps
        first = jnp.zeros if kind == "zero_centered_rms" else jnp.ones
        self.shape = shape
        self.scale = nnx.Param(first(shape), out_sharding=names) if kind != "nonparametric_layer" else None
        self.bias = bias(kind == "layer", shape, names)

    def __call__(self, x: jax.Array, *, looped: bool = False) -> jax.Array:
        """Normalizes x over the dims of the scale, its last ones; `looped`: whether `x` is computed in a loop."""
        scale = jnp.ones(self.shape, x.dtype) if self.scale is None else self.scale[...]
        scale = scale + 1 if self.kind == "zero_centered_rms" else scale
        flat = x.reshape(*x.shape[: x.ndim - scale.ndim], scale.size)
        y: Any = normalize(flat, scale.reshape(-1), self.eps, self.kind in ("layer", "nonparametric_layer"), looped)
        y = y.reshape(x.shape)
        return y if self.bias is None else y + self.bias[...]


@dataclass(frozen=True)
class LayerKind:
    """The attention of one layer.

    Attributes:
      rope: Rotary positions, or None.
      window: A token attends to itself and the window - 1 tokens before it; None is no bound.
    """

    rope: Rope | None = None
    window: int | None = None


@dataclass(frozen=True, kw_only=True)
class BlockConfig:
    """Shape and kind of a transformer block; names and values are those of `DecoderConfig`.

    Attributes:
      dim: Width of the stream.
      heads: Attention heads.
      kv_heads: Heads of keys and values.
      head_dim: Width of a head; 0 means dim / heads.
      hidden: Width of the feed-forward.
      norm: rms, zero_centered_rms, layer or nonparametric_layer.
      gated: Whether the feed-forward has a gate.
      biases: Matrices with biases.
      causal: Whether a token attends only to itself and earlier tokens.
      dropout: Dropout rate, if a key is given.
      out_scale: Factor of the initial values of matrices that write to the stream, 1 / sqrt(2 layers) in GPT-2.
      norm_eps: Epsilon that the norms add to the mean square.
      norm_position: pre, post or both.
      qk_norm: none, head or all_heads.
      parallel_residual: Whether attention and feed-forward read the same stream.
      shared_norm: Whether they also share the norm before them.
      activation: silu, gelu or gelu_tanh.
      attention_scale: Factor of the scores; 0 means 1 / sqrt(head_dim).
      attention_softcap: Softcap of the scores; 0 means none.
      residual_scale: Factor of a layer's output before it is added to the residual stream.
    """

    dim: int
    heads: int
    kv_heads: int
    hidden: int
    norm: NormKind
    gated: bool
    biases: tuple[BiasedPart, ...]
    causal: bool
    dropout: float
    out_scale: float
    head_dim: int = 0
    norm_eps: float = 1e-5
    norm_position: NormPosition = "pre"
    qk_norm: QueryKeyNorm = "none"
    parallel_residual: bool = False
    shared_norm: bool = False
    activation: Activation = "gelu_tanh"
    attention_scale: float = 0.0
    attention_softcap: float = 0.0
    residual_scale: float = 1.0


class Attention(nnx.Module):
    """Multi-head attention, grouped-query where `kv_heads` < `heads` (arXiv:2305.13245)."""

    def __init__(self, s: BlockConfig, *, rngs: nnx.Rngs):
        head_dim, scale = s.head_dim or s.dim // s.heads, 1 / math.sqrt(s.dim)
        self.settings = s
        self.query = weight(rngs, (s.dim, s.heads, head_dim), ("embed", "heads", "head_dim"), scale)
        self.key = weight(rngs, (s.dim, s.kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), scale)
        self.value = weight(rngs, (s.dim, s.kv_heads, head_dim), ("embed", "kv_heads", "head_dim"), scale)
        self.out = weight(rngs, (s.heads, head_dim, s.dim), ("heads", "head_dim", "embed"), scale * s.out_scale)
        has_bias = "qkv" in s.biases
        self.query_bias = bias(has_bias, (s.heads, head_dim), ("heads", "head_dim"))
        self.key_bias = bias(has_bias, (s.kv_heads, head_dim), ("kv_heads", "head_dim"))
        self.value_bias = bias(has_bias, (s.kv_heads, head_dim), ("kv_heads", "head_dim"))
        self.out_bias = bias("out" in s.biases, (s.dim,), ("embed",))
        self.norm_query = self._head_norm(s.heads, head_dim, "heads")
        self.norm_key = self._head_norm(s.kv_heads, head_dim, "kv_heads")

    def _head_norm(self, heads: int, head_dim: int, name: str) -> Norm | None:
        s = self.settings
        kind: NormKind = "zero_centered_rms" if s.norm == "zero_centered_rms" else "rms"
        if s.qk_norm == "none":
            return None
        if s.qk_norm == "head":
            return Norm(head_dim, kind=kind, eps=s.norm_eps, names=("head_dim",))
        return Norm((heads, head_dim), kind=kind, eps=s.norm_eps, names=(name, "head_dim"))

    def __call__(self, x_bsd: jax.Array, documents: Documents = ONE, kind: LayerKind = LayerKind()) -> jax.Array:
        """Attention output [batch, seq, dim]; a token attends only to tokens of its document."""
        projected = self._project(x_bsd, kind, documents.positions)
        softcap = self.settings.attention_softcap or None
        y = attention(
            *projected, causal=self.settings.causal, window=kind.window, segments=documents.segments, softcap=softcap
        )
        return self._project_out(y)

    def run_cached(self, x_bsd: jax.Array, layer: LayerCache, kind: LayerKind) -> tuple[jax.Array, LayerCache]:
        """Attention with a KV cache. Returns the output [batch, seq, dim] and the updated cache."""
        projected = self._project(x_bsd, kind, layer.positions, seq=layer.keys.shape[1])
        y, layer = layer.attend(*projected, window=kind.window, softcap=self.settings.attention_softcap or None)
        return self._project_out(y), layer

    def _project(
        self, x_bsd: jax.Array, kind: LayerKind, positions: jax.Array | None = None, *, seq: int = 0
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        s = self.settings
        # constrained as soon as they exist, so that sequence parallelism gathers the stream and not the weights
        q = constrain(jnp.einsum("bsd,dhk->bshk", x_bsd, self.query[...]), *QUERIES)
        k = constrain(jnp.einsum("bsd,dgk->bsgk", x_bsd, self.key[...]), *KEYS)
        v = constrain(jnp.einsum("bsd,dgk->bsgk", x_bsd, self.value[...]), *KEYS)
        q, k, v = _add_bias(q, self.query_bias), _add_bias(k, self.key_bias), _add_bias(v, self.value_bias)
        q, k = _normalize(self.norm_query, q), _normalize(self.norm_key, k)
        if kind.rope is not None:
            q, k = rotate(q, kind.rope, positions, seq=seq), rotate(k, kind.rope, positions, seq=seq)
        if s.attention_scale:  # attention itself divides by sqrt(head_dim)
            q = q * jnp.asarray(s.attention_scale * math.sqrt(q.shape[-1]), q.dtype)
        return q, k, v

    def _project_out(self, y: jax.Array) -> jax.Array:
        y = constrain(y, *QUERIES)
        return _add_bias(jnp.einsum("bshk,hkd->bsd", y, self.out[...]), self.out_bias)


class FeedForward(nnx.Module):
    """Two matrices with an activation between them, or three with a gate (SwiGLU and GEGLU, arXiv:2002.05202)."""

    def __init__(self, s: BlockConfig, *, rngs: nnx.Rngs):
        self.activation: Activation = s.activation
        self.up = weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), 1 / math.sqrt(s.dim))
        self.gate = weight(rngs, (s.dim, s.hidden), ("embed", "mlp"), 1 / math.sqrt(s.dim)) if s.gated else None
        self.down = weight(rngs, (s.hidden, s.dim), ("mlp", "embed"), s.out_scale / math.sqrt(s.hidden))
        has_bias = "mlp" in s.biases
        self.up_bias = bias(has_bias, (s.hidden,), ("mlp",))
        self.gate_bias = bias(has_bias and s.gated, (s.hidden,), ("mlp",))
        self.down_bias = bias(has_bias, (s.dim,), ("embed",))

    def __call__(self, x_bsd: jax.Array) -> jax.Array:
        """Returns [batch, seq, dim]."""
        # up and gate are sharded by columns and down by rows: one sum over `tensor` for the three (Megatron's pair)
        h = constrain(jnp.einsum("bsd,df->bsf", x_bsd, self.up[...]), "batch", "seq", "mlp")
        h = _add_bias(h, self.up_bias)
        if self.gate is None:
            h = activate(h, self.activation)
        else:
            gate = constrain(jnp.einsum("bsd,df->bsf", unmerged_input(x_bsd), self.gate[...]), "batch", "seq", "mlp")
            h = activate_gate(self.activation, _add_bias(gate, self.gate_bias), h)
        return _add_bias(jnp.einsum("bsf,fd->bsd", h, self.down[...]), self.down_bias)


def activate_gate(activation: Activation, gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes activation(gate) * up."""
    return swiglu(gate, up) if activation == "silu" else geglu(gate, up, activation == "gelu_tanh")


class Block(nnx.Module):
    """A transformer layer: attention, then the feed-forward, each added to the stream."""

    def __init__(self, s: BlockConfig, mlp: Callable[..., nnx.Module] = FeedForward, *, rngs: nnx.Rngs):
        norm = partial(Norm, s.dim, kind=s.norm, eps=s.norm_eps)
        before, after = s.norm_position != "post", s.norm_position != "pre"
        self.settings = s
        self.norm_attention = norm() if before else None
        self.attention = Attention(s, rngs=rngs)
        self.post_norm_attention = norm() if after else None
        self.norm_mlp = norm() if before and not s.shared_norm else None
        self.mlp: Any = mlp(s, rngs=rngs)
        self.post_norm_mlp = norm() if after else None

    def __call__(
        self, x_bsd: jax.Array, key: jax.Array | None, documents: Documents = ONE, kind: LayerKind = LayerKind()
    ) -> jax.Array:
        """Output [batch, seq, dim]; no dropout without a key."""
        return self.layer(x_bsd, key, lambda x: self.attention(x, documents, kind), self.mlp)

    def run_stream(self, stream: jax.Array | dict, key: jax.Array | None, kind: LayerKind) -> Any:
        """Applies the block to a stream, which may have documents: see `Documents.attach`."""
        return apply_layer(lambda x, documents: self(x, key, documents, kind), stream)

    def run_cached(self, x_bsd: jax.Array, layer: LayerCache, kind: LayerKind) -> tuple[jax.Array, LayerCache]:
        """The block with a KV cache. Returns the output [batch, seq, dim] and the updated cache."""
        updated: list[LayerCache] = []

        def attend(x: jax.Array) -> jax.Array:
            y, cache = self.attention.run_cached(x, layer, kind)
            updated.append(cache)
            return y

        return self.layer(x_bsd, None, attend, self.feed_forward), updated[0]

    def feed_forward(self, x_bsd: jax.Array) -> jax.Array:
        """The feed-forward layer [batch, seq, dim] in decoding."""
        return self.mlp(x_bsd)

    def layer(
        self,
        x_bsd: jax.Array,
        key: jax.Array | None,
        attend: Callable[[jax.Array], jax.Array],
        mlp: Callable[[jax.Array], jax.Array],
    ) -> jax.Array:
        """Adds attention and the feed-forward to the stream, each with its norms, dropout and scale."""
        keys = (None, None) if key is None else jax.random.split(key)
        normalized_bsd = _normalize(self.norm_attention, x_bsd)
        y_bsd = _normalize(self.post_norm_attention, attend(normalized_bsd))
        after_bsd = x_bsd + self._branch(y_bsd, keys[0])
        # attention's output is a sum over `tensor`: constrained here, it is a reduce-scatter in sequence parallelism
        after_bsd = constrain(after_bsd, "batch", "seq", "embed")
        read_bsd = x_bsd if self.settings.parallel_residual else after_bsd
        read_bsd = normalized_bsd if self.settings.shared_norm else _normalize(self.norm_mlp, read_bsd)
        y_bsd = _normalize(self.post_norm_mlp, mlp(read_bsd))
        return constrain(after_bsd + self._branch(y_bsd, keys[1]), "batch", "seq", "embed")

    def _branch(self, y_bsd: jax.Array, key: jax.Array | None) -> jax.Array:
        s = self.settings
        y_bsd = y_bsd if s.residual_scale == 1 else y_bsd * jnp.asarray(s.residual_scale, y_bsd.dtype)
        return dropout(y_bsd, s.dropout, key)


def _add_bias(x: jax.Array, offset: nnx.Param | None) -> jax.Array:
    return x if offset is None else x + offset[...]


def _normalize(norm: Norm | None, x: jax.Array) -> jax.Array:
    return x if norm is None else norm(x)
