"""Attention on one device, block by block, with a backward pass of its own.

It keeps q, k, v, the output and a logsumexp for every query: memory grows as the sequence does, not as its square. The
logsumexp of JAX's `return_residual` would not do: it is cut off from the gradient, and rounded to the inputs' dtype.
"""

from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.cutting import cut_heads, cut_keys, cut_positions, cut_segments, joined_heads, joined_keys
from jaxpar.models.blocks.kernel import (
    Ended,
    Keys,
    Queries,
    ended,
    meet,
    meet_back,
    no_grads,
    nothing_met,
    tied,
    wide,
)
from jaxpar.models.blocks.pairs import Blocks, most, pairs
from jaxpar.models.blocks.rule import Rule


def blockwise(
    q_bshk: jax.Array,
    k_btgk: jax.Array,
    v_btgk: jax.Array,
    *,
    rule: Rule,
    segments_bs: jax.Array | None = None,
    block: int | None = None,
) -> jax.Array:
    """Returns softmax(q k / sqrt(head_dim)) v over the keys that `rule` and segments let a query see, block by block.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of `k`.
      rule: Causal or not, a window, and a softcap.
      segments_bs: Segment of every token, where there are as many keys as queries. Shape [batch, queries].
      block: Tokens of a block at most; None is as `most` has it.

    Returns:
      Shape and dtype of `q`. A query that sees no key has zeros.
    """
    return _blockwise(q_bshk, k_btgk, v_btgk, segments_bs, rule, block)


@partial(jax.custom_vjp, nondiff_argnums=(4, 5))
def _blockwise(q, k, v, segments, rule: Rule, block: int | None) -> jax.Array:
    return _forward(q, k, v, segments, rule, block)[0]


def _forward(q, k, v, segments, rule: Rule, block: int | None) -> tuple[jax.Array, tuple]:
    of_q, of_k = _blocks(q, k, block)
    queries, keys = _cut(q, k, v, segments, of_q, of_k)
    sums = meet(nothing_met(queries.q), queries, keys, pairs(rule, of_q, of_k), rule)
    out, logsumexp = ended(sums, q.dtype)
    out = joined_heads(out, of_q)
    return out, (q, k, v, segments, out, logsumexp)


def _backward(rule: Rule, block: int | None, kept: tuple, grad: jax.Array) -> tuple:
    q, k, v, segments, out, logsumexp = kept
    of_q, of_k = _blocks(q, k, block)
    queries, keys = _cut(q, k, v, segments, of_q, of_k)
    groups = k.shape[2]
    end = end_of(cut_heads(grad, of_q, groups), cut_heads(out, of_q, groups), logsumexp)
    zeros = jnp.zeros(queries.q.shape, wide(q))
    dq, dkv = meet_back((zeros, no_grads(keys.kv)), queries, keys, end, (pairs(rule, of_q, of_k), rule))
    return joined_heads(dq, of_q).astype(q.dtype), *joined_keys(dkv.astype(k.dtype), of_k), None


_blockwise.defvjp(_forward, _backward)


def end_of(grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> Ended:
    """Returns what the backward pass knows of queries, of their gradient and output in blocks."""
    dtype = wide(out)
    return Ended(grad, jnp.sum(grad.astype(dtype) * out.astype(dtype), axis=-1), logsumexp)


def _blocks(q, k, block: int | None) -> tuple[Blocks, Blocks]:
    """Returns how queries and keys are cut."""
    at_most = (block, block) if block else most(q.shape[1], q.shape[3])
    return Blocks.of(q.shape[1], at_most[0]), Blocks.of(k.shape[1], at_most[1])


def _cut(q, k, v, segments, of_q: Blocks, of_k: Blocks) -> tuple[Queries, Keys]:
    """Returns queries, and keys and values, in blocks."""
    places = [None if segments is None else cut_segments(segments, blocks) for blocks in (of_q, of_k)]
    at_q, at_k = (cut_positions(jnp.arange(blocks.tokens), blocks) for blocks in (of_q, of_k))
    queries = Queries(cut_heads(q, of_q, k.shape[2]), at_q, places[0])
    return tied(queries), tied(Keys(cut_keys(k, v, of_k), at_k, places[1]))
