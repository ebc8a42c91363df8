"""Attention that materializes all scores; `noted` records their size while a job is traced."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.kernel import accumulator_dtype

_noting: ContextVar[list[int] | None] = ContextVar("noting", default=None)


@contextmanager
def record_sizes() -> Iterator[list[int]]:
    """Records the sizes of materialized scores, while the context lasts.

    Yields:
      Bytes per device in float32, for each traced call of attention. Complete when the context ends.
    """
    sizes: list[int] = []
    token = _noting.set(sizes)
    try:
        yield sizes
    finally:
        _noting.reset(token)


def add_size(size: int) -> None:
    """Adds the bytes of one call's scores to the record, if there is one."""
    sizes = _noting.get()
    if sizes is not None:
        sizes.append(size)


def attend(
    q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, rule: AttentionMask, segments_bs: jax.Array | None
) -> jax.Array:
    """Attention under any mask or softcap, with XLA's matmuls and float32 scores: what `jax.nn` has no arguments for.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of `k`.
      rule: Causal or not, a window, and a softcap.
      segments_bs: Segment of every token. Shape [batch, queries].

    Returns:
      Shape and dtype of `q`.
    """
    b, s, heads, head_dim = q_bshk.shape
    t, groups = k_btgk.shape[1:3]
    q_bsgrk = q_bshk.reshape(b, s, groups, heads // groups, head_dim)
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_bsgrk, k_btgk, preferred_element_type=accumulator_dtype(q_bshk))
    scores = rule.cap(scores / math.sqrt(head_dim))
    seen = rule.mask(jnp.arange(s), jnp.arange(t), segments_bs, segments_bs)
    scores = jnp.where(seen, scores, -0.5 * jnp.finfo(scores.dtype).max)
    shares = jax.nn.softmax(scores, axis=-1).astype(v_btgk.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", shares, v_btgk).reshape(q_bshk.shape)
