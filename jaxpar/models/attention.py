"""Attention of the reference transformers, over whole sequences or over pieces of them.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, r heads that share one of those,
k head_dim.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.models.named import spec_of

Attend = Callable[..., jax.Array]  # (q_bshk, k_btgk, v_btgk, *, is_causal) -> bshk
QUERIES = ("batch", "seq", "heads", "head_dim")
KEYS = ("batch", "seq", "kv_heads", "head_dim")
_WHOLE = ("batch", "keys", "kv_heads", "head_dim")


def gathered(x_btgk: jax.Array) -> jax.Array:
    """Returns keys or values of whole sequences, where devices have pieces of them; else `x_btgk` itself.

    Their gradient goes straight back to the pieces: left to itself JAX has it whole first, which is an all-reduce where
    a reduce-scatter would do.
    """
    own, whole = spec_of(KEYS), spec_of(_WHOLE)
    return x_btgk if own == whole else _moved(x_btgk, whole, own)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, there: PartitionSpec, back: PartitionSpec) -> jax.Array:
    return jax.lax.with_sharding_constraint(x, there)


_moved.defvjp(
    lambda x, there, back: (_moved(x, there, back), None),
    lambda there, back, _, gradient: (jax.lax.with_sharding_constraint(gradient, back),),
)


@dataclass(frozen=True)
class Rope:
    """Rotary position embeddings: how fast the pairs of a head turn (Su et al. 2021, arXiv:2104.09864).

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
    if low and _in_pieces():
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


def _in_pieces() -> bool:
    """Returns whether devices have pieces of sequences in attention."""
    spec = spec_of(QUERIES)
    return spec is not None and spec[1] is not None
