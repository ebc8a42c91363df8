"""One walk over a table of pairs of blocks: the online softmax forward, and backward from its final statistics.

    forward    top, total, sum  of each query, over the keys met so far     (Milakov, Gimelshein 2018, arXiv:1805.02867)
    backward   exp(score - logsumexp) again, pair by pair                   (FlashAttention, arXiv:2205.14135, appendix)

Statistics and sums are float32 (float64 of float64), matmuls run in the dtype of what they are given. The backward pass
is exact only with the logsumexp and the output over all keys, so a ring walks backward after the last piece has come.
"""

import math
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.rule import Rule

Table = np.ndarray | jax.Array  # [pairs, 2], int32


class Queries(NamedTuple):
    """Queries in blocks, with where they stand."""

    q: jax.Array  # [n, b, g, r, q, k]
    at: jax.Array  # [n, q]
    segments: jax.Array | None  # [n, b, q]


class Keys(NamedTuple):
    """Keys and values in blocks, as one array that travels in one message, with where they stand."""

    kv: jax.Array  # [n, 2, b, g, c, k]
    at: jax.Array  # [n, c]
    segments: jax.Array | None  # [n, b, c]


Placed = TypeVar("Placed", Queries, Keys)


class Sums(NamedTuple):
    """What queries have gathered from the keys that they have met."""

    out: jax.Array  # [n, b, g, r, q, k]: sum of exp(score - top) v
    total: jax.Array  # [n, b, g, r, q]: sum of exp(score - top)
    top: jax.Array  # [n, b, g, r, q]: the highest score


class Ended(NamedTuple):
    """What the backward pass knows of queries that have met all keys."""

    grad: jax.Array  # [n, b, g, r, q, k]: the gradient of the output
    delta: jax.Array  # [n, b, g, r, q]: sum of gradient times output
    logsumexp: jax.Array  # [n, b, g, r, q]


def tied(blocks: Placed) -> Placed:
    """Returns queries or keys in blocks, tied to where they stand.

    A scan over layers is differentiated without what is the same in all of them: JAX computes that before the scan and
    keeps it. Of places alone that would be the masks of all pairs of blocks, as many entries as there are scores.
    """
    return type(blocks)(*jax.lax.optimization_barrier(tuple(blocks)))


def wide(x: jax.Array) -> jnp.dtype:
    """Returns the dtype of statistics and sums."""
    return jnp.promote_types(x.dtype, jnp.float32)


def nothing_met(q: jax.Array) -> Sums:
    """Returns the sums of queries that have met no key."""
    dtype = wide(q)
    lowest = jnp.full(q.shape[:-1], -0.5 * jnp.finfo(dtype).max, dtype)
    return Sums(jnp.zeros(q.shape, dtype), jnp.zeros(q.shape[:-1], dtype), lowest)


def no_grads(kv: jax.Array) -> jax.Array:
    """Returns gradients of keys and values that are zero, in the dtype of sums."""
    return jnp.zeros(kv.shape, wide(kv))


def ended(sums: Sums, dtype: jnp.dtype) -> tuple[jax.Array, jax.Array]:
    """Returns the output and the logsumexp of queries that have met all keys; zeros where one saw none of them."""
    total = jnp.where(sums.total == 0, 1, sums.total)
    return (sums.out / total[..., None]).astype(dtype), sums.top + jnp.log(total)


def meet(sums: Sums, queries: Queries, keys: Keys, table: Table, rule: Rule) -> Sums:
    """Returns the sums after the queries of each row's first block have met the keys of its second."""

    def step(sums: Sums, row: jax.Array) -> tuple[Sums, None]:
        i, j = row[0], row[1]
        scores, seen = _scores(queries, keys, i, j, rule)
        out, total, top = (_at(x, i) for x in sums)
        higher = jnp.maximum(top, jnp.max(scores, axis=-1))
        shares = jnp.where(seen, jnp.exp(scores - higher[..., None]), 0)
        kept = jnp.exp(top - higher)
        v = _at(keys.kv, j)[1]
        more = jnp.einsum("bgrqc,bgck->bgrqk", shares.astype(v.dtype), v, preferred_element_type=out.dtype)
        new = Sums(out * kept[..., None] + more, total * kept + jnp.sum(shares, axis=-1), higher)
        return Sums(*(_put(x, y, i) for x, y in zip(sums, new, strict=True))), None

    return jax.lax.scan(step, sums, jnp.asarray(table))[0]


def meet_back(
    grads: tuple[jax.Array, jax.Array], queries: Queries, keys: Keys, end: Ended, walk: tuple[Table, Rule]
) -> tuple[jax.Array, jax.Array]:
    """Returns the gradients of queries, and of keys and values, with those of every pair of the table added."""
    table, rule = walk
    low = queries.q.dtype
    scale = 1 / math.sqrt(queries.q.shape[-1])

    def step(carry: tuple[jax.Array, jax.Array], row: jax.Array) -> tuple[tuple[jax.Array, jax.Array], None]:
        of_q, of_kv = carry
        i, j = row[0], row[1]
        q, grad, (k, v) = _at(queries.q, i), _at(end.grad, i), _at(keys.kv, j)
        scores, seen = _scores(queries, keys, i, j, rule)
        shares = jnp.where(seen, jnp.exp(scores - _at(end.logsumexp, i)[..., None]), 0)
        slopes = jnp.einsum("bgrqk,bgck->bgrqc", grad, v, preferred_element_type=scores.dtype)
        slopes = rule.uncapped(shares * (slopes - _at(end.delta, i)[..., None]), scores)
        slopes = (slopes * scale).astype(low)
        more_q = jnp.einsum("bgrqc,bgck->bgrqk", slopes, k, preferred_element_type=of_q.dtype)
        more_k = jnp.einsum("bgrqc,bgrqk->bgck", slopes, q, preferred_element_type=of_kv.dtype)
        more_v = jnp.einsum("bgrqc,bgrqk->bgck", shares.astype(low), grad, preferred_element_type=of_kv.dtype)
        return (_add(of_q, more_q, i), _add(of_kv, jnp.stack([more_k, more_v]), j)), None

    return jax.lax.scan(step, grads, jnp.asarray(table))[0]


def _scores(queries: Queries, keys: Keys, i: jax.Array, j: jax.Array, rule: Rule) -> tuple[jax.Array, jax.Array]:
    """Returns the scores of a pair [b, g, r, q, c], lowest where a key is not seen, and which are seen."""
    q, k = _at(queries.q, i), _at(keys.kv, j)[0]
    scores = jnp.einsum("bgrqk,bgck->bgrqc", q, k, preferred_element_type=wide(q)) / math.sqrt(q.shape[-1])
    scores = rule.capped(scores)
    of_q, of_k = (None if x is None else _at(x, at) for x, at in ((queries.segments, i), (keys.segments, j)))
    seen = rule.seen(_at(queries.at, i), _at(keys.at, j), of_q, of_k)
    return jnp.where(seen, scores, -0.5 * jnp.finfo(scores.dtype).max), seen


def _at(x: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_index_in_dim(x, i, keepdims=False)


def _put(x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    return jax.lax.dynamic_update_index_in_dim(x, block, i, 0)


def _add(x: jax.Array, block: jax.Array, i: jax.Array) -> jax.Array:
    return _put(x, _at(x, i) + block, i)
