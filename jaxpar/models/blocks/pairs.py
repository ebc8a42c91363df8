"""Table of the blocks of queries and blocks of keys that meet: one pair per row, scanned from the top.

    causal, 4 blocks            causal, window of one block
    q0  x                       x
    q1  x x                     x x
    q2  x x x                     x x
    q3  x x x x                     x x

A pair without a row costs nothing: causal attention of n blocks runs n (n + 1) / 2 of n^2 pairs. Segments are known
only at run time, so pairs of different segments are computed and masked.

The scan holds the scores of one pair at a time, heads x queries x keys, next to arrays of all tokens. At one block size
for all lengths they are a constant: a quarter of the memory at 4,096 tokens and a twelfth at 16,384. If the area of a
block grows with the tokens, they are the same share of both, and memory doubles when tokens do.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpar.models.blocks.attention_mask import AttentionMask

BLOCK = 512  # maximum tokens per block: the scores of one pair are batch x heads x BLOCK^2 float32, 1 MiB a head
LEAST = 256  # minimum tokens per block, if there are as many: smaller matmuls leave most of a GPU idle
SHARE = 8  # entries of all queries per score of a pair


def max_block_sizes(tokens: int, head_dim: int) -> tuple[int, int]:
    """Maximum tokens per block of queries and per block of keys, on a device that has so many tokens.

    Blocks of keys are larger: a pair's queries are read and their sums written once for all of its keys.

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
        """The fewest equal blocks of at most `max_tokens` tokens."""
        count = -(-tokens // max_tokens)
        return Blocks(tokens, count, -(-tokens // count))

    def range(self, block: int) -> tuple[int, int]:
        """First and last position of a block in its chunk."""
        return block * self.size, min((block + 1) * self.size, self.tokens) - 1


def pairs(rule: AttentionMask, queries: Blocks, keys: Blocks) -> np.ndarray:
    """Pairs of blocks in which a query may see a key. Shape [pairs, 2]: block of queries, block of keys."""
    rows = [
        (i, j) for i in range(queries.count) for j in range(keys.count) if rule.reaches(queries.range(i), keys.range(j))
    ]
    return np.array(rows, np.int32).reshape(-1, 2)


def all_pairs(queries: Blocks, keys: Blocks) -> np.ndarray:
    """All pairs of blocks. Shape [pairs, 2]."""
    return pairs(AttentionMask(), queries, keys)
