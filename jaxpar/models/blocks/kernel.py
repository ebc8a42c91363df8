"""Scans a table of pairs of blocks: online softmax forward, and the backward pass from the final statistics.

    forward    top, total, sum  of each query, over the keys so far         (Milakov, Gimelshein 2018, arXiv:1805.02867)
    backward   exp(score - logsumexp) again, pair by pair                   (FlashAttention, arXiv:2205.14135, appendix)

Statistics and sums are float32 (float64 for float64 inputs), matmuls run in the dtype of their inputs. The backward
pass is exact only with the logsumexp and output over all keys, so a ring runs it after the last keys have arrived.

The table has the pairs (block of queries, block of keys) that a mask does not exclude, one per row:

    causal, 4 blocks            causal, window of one block
    q0  x                       x
    q1  x x                     x x
    q2  x x x                     x x
    q3  x x x x                     x x

A pair without a row costs nothing: causal attention of n blocks runs n (n + 1) / 2 of n^2 pairs. Segments are known
only at run time, so pairs of different segments are computed and masked.

The scan holds the scores of one pair at a time, heads x queries x keys, and arrays of all tokens. With one block size
for all lengths the scores would be a quarter of the memory at 4,096 tokens and a twelfth at 16,384. Here the area of a
block grows with the tokens, so the scores are a constant share, and memory doubles when the tokens double.
"""

import math
from dataclasses import dataclass
from typing import NamedTuple, TypeVar

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention_mask import NOWHERE, AttentionMask

BLOCK = 512  # maximum tokens per block: the scores of one pair are batch x heads x BLOCK^2 float32, 1 MiB a head
LEAST = 256  # minimum tokens per block, if there are as many: smaller matmuls leave most of a GPU idle
SHARE = 8  # entries of all queries per score of a pair
Table = np.ndarray | jax.Array  # [pairs, 2], int32


def max_block_sizes(tokens: int, head_dim: int) -> tuple[int, int]:
    """Maximum tokens per block of queries and per block of keys, for a number of tokens on a device.

    Blocks of keys are larger, because the kernel reads queries and writes their sums once per pair.

    >>> max_block_sizes(4096, 128), max_block_sizes(8192, 128), max_block_sizes(16384, 128), max_block_sizes(2**20, 128)
    ((256, 256), (256, 512), (512, 512), (512, 512))
    """
    area = tokens * head_dim // SHARE
    keys = min(BLOCK, max(LEAST, 2 ** math.ceil(math.log2(area) / 2))) if area else LEAST
    return min(BLOCK, max(LEAST, area // keys)), keys


@dataclass(frozen=True)
class Blocks:
    """Splits a sequence, or each of its equal chunks, into blocks of equal length.

    Attributes:
      tokens: Tokens per chunk.
      count: Blocks per chunk.
      size: Tokens per block; count * size is tokens, plus the padding of the last block.
    """

    tokens: int
    count: int
    size: int

    @staticmethod
    def split(tokens: int, max_tokens: int = BLOCK) -> "Blocks":
        """Returns the fewest equal blocks of at most `max_tokens` tokens."""
        count = -(-tokens // max_tokens)
        return Blocks(tokens, count, -(-tokens // count))

    def range(self, block: int) -> tuple[int, int]:
        """First and last position of a block in its chunk."""
        return block * self.size, min((block + 1) * self.size, self.tokens) - 1


def pairs(rule: AttentionMask, queries: Blocks, keys: Blocks) -> np.ndarray:
    """Returns the pairs of blocks in which a query may attend to a key. Shape [pairs, 2]: (queries, keys)."""
    rows = [
        (i, j) for i in range(queries.count) for j in range(keys.count) if rule.reaches(queries.range(i), keys.range(j))
    ]
    return np.array(rows, np.int32).reshape(-1, 2)


def all_pairs(queries: Blocks, keys: Blocks) -> np.ndarray:
    """All pairs of blocks. Shape [pairs, 2]."""
    return pairs(AttentionMask(), queries, keys)


# Splits sequences into chunks and blocks, block index first, and joins them again.
#
# [batch, chunks * tokens, heads, head_dim]  ──►  [chunks * blocks, batch, g, r, tokens of a block, head_dim]
#
# Blocks are the first dim because a scan over pairs takes one at a time. Padding of a last block has no position.


def split_heads(x_bshk: jax.Array, blocks: Blocks, groups: int) -> jax.Array:
    """Splits queries, keys or values into blocks. Shape [n, b, g, r, tokens of a block, k]."""
    batch, _, heads, head_dim = x_bshk.shape
    x = _pad(x_bshk.reshape(batch, -1, blocks.tokens, heads, head_dim), blocks, 0)
    x = x.reshape(batch, -1, blocks.size, groups, heads // groups, head_dim)
    return x.transpose(1, 0, 3, 4, 2, 5)


def split_keys(k_btgk: jax.Array, v_btgk: jax.Array, blocks: Blocks) -> jax.Array:
    """Splits keys and values into blocks, as one array. Shape [n, 2, b, g, tokens of a block, k]."""
    return jnp.stack([split_heads(x, blocks, x.shape[2])[:, :, :, 0] for x in (k_btgk, v_btgk)], axis=1)


def join_keys(kv: jax.Array, blocks: Blocks) -> tuple[jax.Array, jax.Array]:
    """Inverse of `split_keys`. Shapes [b, t, g, k]."""
    k, v = (join_heads(x[:, :, :, None], blocks) for x in kv.swapaxes(0, 1))
    return k, v


def join_heads(x_nbgrqk: jax.Array, blocks: Blocks) -> jax.Array:
    """Inverse of `split_heads`. Shape [b, s, h, k]."""
    count, batch, groups, shared, _, head_dim = x_nbgrqk.shape
    x = x_nbgrqk.transpose(1, 0, 4, 2, 3, 5).reshape(batch, count // blocks.count, -1, groups * shared, head_dim)
    return x[:, :, : blocks.tokens].reshape(batch, -1, groups * shared, head_dim)


def split_positions(positions_s: jax.Array, blocks: Blocks) -> jax.Array:
    """Splits positions into blocks. Shape [n, tokens of a block]; padding is `NOWHERE`."""
    return _pad(positions_s.reshape(1, -1, blocks.tokens), blocks, NOWHERE).reshape(-1, blocks.size)


def split_segments(segments_bs: jax.Array, blocks: Blocks) -> jax.Array:
    """Splits segments into blocks. Shape [n, b, tokens of a block]."""
    batch = segments_bs.shape[0]
    x = _pad(segments_bs.reshape(batch, -1, blocks.tokens), blocks, 0)
    return x.reshape(batch, -1, blocks.size).swapaxes(0, 1)


def _pad(x: jax.Array, blocks: Blocks, value: int) -> jax.Array:
    """Pads [batch, chunks, tokens, ...] to whole blocks along the tokens of each chunk."""
    padding = blocks.count * blocks.size - blocks.tokens
    if not padding:
        return x
    return jnp.pad(x, [(0, 0), (0, 0), (0, padding)] + [(0, 0)] * (x.ndim - 3), constant_values=value)


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
