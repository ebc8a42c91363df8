"""Table of the pairs (block of queries, block of keys) that a mask does not exclude: one pair per row.

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

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention_mask import NOWHERE, AttentionMask

BLOCK = 512  # maximum tokens per block: the scores of one pair are batch x heads x BLOCK^2 float32, 1 MiB a head
LEAST = 256  # minimum tokens per block, if there are as many: smaller matmuls leave most of a GPU idle
SHARE = 8  # entries of all queries per score of a pair


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
