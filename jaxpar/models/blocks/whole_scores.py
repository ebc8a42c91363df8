"""The scores of attention that are there all at once: who sizes up a job opens `noted` while it is traced."""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.kernel import wide
from jaxpar.models.blocks.rule import Rule

_noting: ContextVar[list[int] | None] = ContextVar("noting", default=None)


@contextmanager
def noted() -> Iterator[list[int]]:
    """Notes scores that are materialised, while the context lasts.

    Yields:
      Bytes of a device in float32, of each call of attention that is traced. Complete when the context ends.
    """
    found: list[int] = []
    token = _noting.set(found)
    try:
        yield found
    finally:
        _noting.reset(token)


def note(size: int) -> None:
    """Adds the bytes of one call's scores to what is noted."""
    found = _noting.get()
    if found is not None:
        found.append(size)


def attend(
    q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, rule: Rule, segments_bs: jax.Array | None
) -> jax.Array:
    """Returns attention under any rule, in matmuls of XLA's whose scores are float32: what `jax.nn` has no words for.

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
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_bsgrk, k_btgk, preferred_element_type=wide(q_bshk))
    scores = rule.capped(scores / math.sqrt(head_dim))
    seen = rule.seen(jnp.arange(s), jnp.arange(t), segments_bs, segments_bs)
    scores = jnp.where(seen, scores, -0.5 * jnp.finfo(scores.dtype).max)
    shares = jax.nn.softmax(scores, axis=-1).astype(v_btgk.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", shares, v_btgk).reshape(q_bshk.shape)
