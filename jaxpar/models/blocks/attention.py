"""Blockwise attention on one device, with a custom backward pass.

It saves q, k, v, the output and a logsumexp per query: memory grows linearly with the sequence, not quadratically. It
cannot use the logsumexp of JAX's `return_residual`, which has no gradient and is rounded to the inputs' dtype.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.kernel import (
    Blocks,
    FinalStatistics,
    Keys,
    Queries,
    accumulate,
    accumulate_grads,
    accumulator_dtype,
    finalize,
    initial_sums,
    join_heads,
    join_keys,
    max_block_sizes,
    pairs,
    split_heads,
    split_keys,
    split_positions,
    split_segments,
    tie,
    zero_grads,
)


def blockwise(
    q_bshk: jax.Array,
    k_btgk: jax.Array,
    v_btgk: jax.Array,
    *,
    rule: AttentionMask,
    segments_bs: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Computes softmax(q k / sqrt(head_dim)) v block by block, over the keys that `rule` and segments do not mask.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of `k`.
      rule: Causal or not, a window, and a softcap.
      segments_bs: Segment of every token; needs as many keys as queries. Shape [batch, queries].
      block: Maximum tokens per block; None uses `max_block_sizes`.

    Returns:
      An array with shape and dtype of `q`; zeros for a query whose keys are all masked.
    """
    return _blockwise(q_bshk, k_btgk, v_btgk, segments_bs, rule, block)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blockwise(q, k, v, segments, rule: AttentionMask, block: int | None) -> jax.Array:
    return _forward(q, k, v, segments, rule, block)[0]


def _forward(q, k, v, segments, rule: AttentionMask, block: int | None) -> tuple[jax.Array, tuple]:
    q_blocks, k_blocks = _blocks(q, k, block)
    queries, keys = _split_blocks(q, k, v, segments, q_blocks, k_blocks)
    sums = accumulate(initial_sums(queries.q), queries, keys, pairs(rule, q_blocks, k_blocks), rule)
    out, logsumexp = finalize(sums, q.dtype)
    out = join_heads(out, q_blocks)
    return out, (q, k, v, segments, out, logsumexp)


def _backward(rule: AttentionMask, block: int | None, residuals: tuple, grad: jax.Array) -> tuple:
    q, k, v, segments, out, logsumexp = residuals
    q_blocks, k_blocks = _blocks(q, k, block)
    queries, keys = _split_blocks(q, k, v, segments, q_blocks, k_blocks)
    groups = k.shape[2]
    end = final_statistics(split_heads(grad, q_blocks, groups), split_heads(out, q_blocks, groups), logsumexp)
    zeros = jnp.zeros(queries.q.shape, accumulator_dtype(q))
    dq, dkv = accumulate_grads(
        (zeros, zero_grads(keys.kv)), queries, keys, end, (pairs(rule, q_blocks, k_blocks), rule)
    )
    return join_heads(dq, q_blocks).astype(q.dtype), *join_keys(dkv.astype(k.dtype), k_blocks), None


_blockwise.defvjp(_forward, _backward)


def final_statistics(grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> FinalStatistics:
    """Computes the statistics of queries for the backward pass, from their output and its gradient in blocks."""
    dtype = accumulator_dtype(out)
    return FinalStatistics(grad, jnp.sum(grad.astype(dtype) * out.astype(dtype), axis=-1), logsumexp)


def _blocks(q, k, block: int | None) -> tuple[Blocks, Blocks]:
    sizes = (block, block) if block else max_block_sizes(q.shape[1], q.shape[3])
    return Blocks.split(q.shape[1], sizes[0]), Blocks.split(k.shape[1], sizes[1])


def _split_blocks(q, k, v, segments, q_blocks: Blocks, k_blocks: Blocks) -> tuple[Queries, Keys]:
    block_segments = [None if segments is None else split_segments(segments, blocks) for blocks in (q_blocks, k_blocks)]
    q_positions, k_positions = (split_positions(jnp.arange(blocks.tokens), blocks) for blocks in (q_blocks, k_blocks))
    queries = Queries(split_heads(q, q_blocks, k.shape[2]), q_positions, block_segments[0])
    return tie(queries), tie(Keys(split_keys(k, v, k_blocks), k_positions, block_segments[1]))


# Attention that materializes all scores; `record_sizes` records their size while a job is traced.

_recorder: ContextVar[list[int] | None] = ContextVar("recorder", default=None)


@contextmanager
def record_sizes() -> Iterator[list[int]]:
    """Context that records the sizes of materialized scores.

    Yields:
      A list with the bytes per device in float32 of each traced call of attention; complete when the context ends.
    """
    sizes: list[int] = []
    token = _recorder.set(sizes)
    try:
        yield sizes
    finally:
        _recorder.reset(token)


def add_size(size: int) -> None:
    """Adds the bytes of one call's scores to the record, if there is one."""
    sizes = _recorder.get()
    if sizes is not None:
        sizes.append(size)


def attend(
    q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, rule: AttentionMask, segments_bs: jax.Array | None
) -> jax.Array:
    """Attention with XLA's matmuls and float32 scores, for masks and softcaps that `jax.nn` has no arguments for.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of `k`.
      rule: Causal or not, a window, and a softcap.
      segments_bs: Segment of every token. Shape [batch, queries].

    Returns:
      Shape and dtype of `q`.
    """
    seen = rule.mask(jnp.arange(q_bshk.shape[1]), jnp.arange(k_btgk.shape[1]), segments_bs, segments_bs)
    return softmax_attention(q_bshk, k_btgk, v_btgk, mask=seen[:, :, 0], rule=rule)


def softmax_attention(
    q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, mask: jax.Array, rule: AttentionMask
) -> jax.Array:
    """Attention with XLA's matmuls and float32 scores, under an array of a mask and the softcap of `rule`.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of `k`.
      mask: Keys that a query attends to. Shape [batch or 1, 1, queries, keys], booleans.
      rule: The softcap.

    Returns:
      Shape and dtype of `q`.
    """
    b, s, heads, head_dim = q_bshk.shape
    groups = k_btgk.shape[2]
    q_bsgrk = q_bshk.reshape(b, s, groups, heads // groups, head_dim)
    scores = jnp.einsum("bsgrk,btgk->bgrst", q_bsgrk, k_btgk, preferred_element_type=accumulator_dtype(q_bshk))
    scores = rule.cap(scores / math.sqrt(head_dim))
    scores = jnp.where(mask[:, :, None], scores, -0.5 * jnp.finfo(scores.dtype).max)
    shares = jax.nn.softmax(scores, axis=-1).astype(v_btgk.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", shares, v_btgk).reshape(q_bshk.shape)
