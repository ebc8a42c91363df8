"""Scans a table of pairs of blocks: online softmax forward, and the backward pass from the final statistics.

    forward    top, total, sum  of each query, over the keys so far         (Milakov, Gimelshein 2018, arXiv:1805.02867)
    backward   exp(score - logsumexp) again, pair by pair                   (FlashAttention, arXiv:2205.14135, appendix)

Statistics and sums are float32 (float64 for float64 inputs), matmuls run in the dtype of their inputs. The backward
pass is exact only with the logsumexp and output over all keys, so a ring runs it after the last keys have arrived.
"""

import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention_mask import AttentionMask

Table = np.ndarray | jax.Array  # [pairs, 2], int32


class Queries(NamedTuple):
    """Queries in blocks, with their positions."""

    q: jax.Array  # [n, b, g, r, q, k]
    positions: jax.Array  # [n, q]
    segments: jax.Array | None  # [n, b, q]


class Keys(NamedTuple):
    """Keys and values in blocks, as one array that is sent in one message, with their positions."""

    kv: jax.Array  # [n, 2, b, g, c, k]
    positions: jax.Array  # [n, c]
    segments: jax.Array | None  # [n, b, c]


Placed = TypeVar("Placed", Queries, Keys)


class KernelSums(NamedTuple):
    """Running sums of queries over the keys that they have attended to so far."""

    out: jax.Array  # [n, b, g, r, q, k]: sum of exp(score - top) v
    total: jax.Array  # [n, b, g, r, q]: sum of exp(score - top)
    top: jax.Array  # [n, b, g, r, q]: the highest score


class FinalStatistics(NamedTuple):
    """Statistics of queries over all keys, for the backward pass."""

    grad: jax.Array  # [n, b, g, r, q, k]: the gradient of the output
    delta: jax.Array  # [n, b, g, r, q]: sum of gradient times output
    logsumexp: jax.Array  # [n, b, g, r, q]


def tie(blocks: Placed) -> Placed:
    """Ties queries or keys in blocks to their positions with an optimization barrier.

    JAX hoists out of a scan over layers, and saves, all values that are equal in every layer. Without the barrier these
    would include the masks of all pairs of blocks, which depend only on positions and are as large as the scores.
    """
    return type(blocks)(*jax.lax.optimization_barrier(tuple(blocks)))


def accumulator_dtype(x: jax.Array) -> jnp.dtype:
    """The dtype of statistics and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


def initial_sums(q: jax.Array) -> KernelSums:
    """Running sums over no keys."""
    dtype = accumulator_dtype(q)
    lowest = jnp.full(q.shape[:-1], -0.5 * jnp.finfo(dtype).max, dtype)
    return KernelSums(jnp.zeros(q.shape, dtype), jnp.zeros(q.shape[:-1], dtype), lowest)


def zero_grads(kv: jax.Array) -> jax.Array:
    """Zero gradients of keys and values, in the dtype of sums."""
    return jnp.zeros(kv.shape, accumulator_dtype(kv))


def finalize(sums: KernelSums, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Computes output and logsumexp from sums over all keys; the output is 0 if all keys of a query are masked."""
    total = jnp.where(sums.total == 0, 1, sums.total)
    return (sums.out / total[..., None]).astype(dtype), sums.top + jnp.log(total)


def accumulate(sums: KernelSums, queries: Queries, keys: Keys, table: Table, rule: AttentionMask) -> KernelSums:
    """For each row (queries, keys) of the table, adds this block of keys to the sums of this block of queries."""

    def step(sums: KernelSums, row: jax.Array) -> tuple[KernelSums, None]:
        i, j = row[0], row[1]
        scores, seen = _scores(queries, keys, i, j, rule)
        out, total, top = (_take_block(x, i) for x in sums)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        shares = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
        decay = jnp.exp(top - higher)
        v = _take_block(keys.kv, j)[1]
        added = jnp.einsum("bgrqc,bgck->bgrqk", shares.astype(v.dtype), v, preferred_element_type=out.dtype)
        new = KernelSums(out * decay[..., None] + added, total * decay + jnp.sum(shares, axis=-1), higher)
        return KernelSums(*(_put(x, y, i) for x, y in zip(sums, new, strict=True))), None

    return jax.lax.scan(step, sums, jnp.asarray(table))[0]


def accumulate_grads(
    grads: tuple[jax.Array, jax.Array],
    queries: Queries,
    keys: Keys,
    end: FinalStatistics,
    table_and_rule: tuple[Table, AttentionMask],
) -> tuple[jax.Array, jax.Array]:
    """For each pair in the table, adds its gradients to those of the queries, and of the keys and values."""
    table, rule = table_and_rule
    low = queries.q.dtype
    scale = 1 / math.sqrt(queries.q.shape[-1])

    def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        dq, dkv = carry
        i, j = row[0], row[1]
        q, grad, (k, v) = _take_block(queries.q, i), _take_block(end.grad, i), _take_block(keys.kv, j)
        scores, seen = _scores(queries, keys, i, j, rule)
        shares = jnp.where(seen, jnp.exp(scores - _take_block(end.logsumexp, i)[..., None]), 0)
        slopes = jnp.einsum("bgrqk,bgck->bgrqc", grad, v, preferred_element_type=scores.dtype)
        slopes = rule.cap_gradient(shares * (slopes - _take_block(end.delta, i)[..., None]), scores)
        slopes = (slopes * scale).astype(low)
        more_q = jnp.einsum("bgrqc,bgck->bgrqk", slopes, k, preferred_element_type=dq.dtype)
        more_k = jnp.einsum("bgrqc,bgrqk->bgck", slopes, q, preferred_element_type=dkv.dtype)
        more_v = jnp.einsum("bgrqc,bgrqk->bgck", shares.astype(low), grad, preferred_element_type=dkv.dtype)
        return (_add(dq, more_q, i), _add(dkv, jnp.stack([more_k, more_v]), j)), None

    return jax.lax.scan(step, grads, jnp.asarray(table))[0]


def _scores(
    queries: Queries, keys: Keys, i: jax.Array, j: jax.Array, rule: AttentionMask
) -> tuple[jax.Array, jax.Array]:
    """Computes the scores of a pair [b, g, r, q, c], the lowest number if a key is masked, and the mask."""
    q, k = _take_block(queries.q, i), _take_block(keys.kv, j)[0]
    scores = jnp.einsum("bgrqk,bgck->bgrqc", q, k, preferred_element_type=accumulator_dtype(q)) / math.sqrt(q.shape[-1])
    scores = rule.cap(scores)
    q_seg, k_seg = (None if x is None else _take_block(x, n) for x, n in ((queries.segments, i), (keys.segments, j)))
    seen = rule.mask(_take_block(queries.positions, i), _take_block(keys.positions, j), q_seg, k_seg)
    return jnp.where(seen, scores, -0.5 * jnp.finfo(scores.dtype).max), seen


def _take_block(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, block, i, 0)


def _add(x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    return _put(x, _take_block(x, i) + block, i)
