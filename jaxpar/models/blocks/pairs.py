"""Which blocks of queries meet which blocks of keys, as a table: one row a pair, walked from the top.

    causal, 4 blocks            causal, window of one block
    q0  x                       x
    q1  x x                     x x
    q2  x x x                     x x
    q3  x x x x                     x x

What is no row costs nothing: causal attention of n blocks walks n (n + 1) / 2 of n^2 pairs. Segments are known only
when a step runs, so what lies in two of them is walked, and masked.

A walk keeps the scores of one pair at a time, heads x queries x keys, beside arrays of all tokens. With one size of
blocks for all rows they are a constant, a quarter of the memory at 4,096 tokens and a twelfth of it at 16,384; with
blocks whose area grows as the tokens do they are the same share of both, and memory doubles as tokens do.
"""

import math
from dataclasses import dataclass

import numpy as np

from jaxpar.models.blocks.rule import Rule

BLOCK = 512  # tokens of a block at most: the scores of one pair are batch x heads x BLOCK^2 float32, 1 MiB a head
LEAST = 256  # tokens of a block at least, where there are as many: matmuls of fewer leave most of a GPU idle
SHARE = 8  # entries of all queries for every score of a pair


def most(tokens: int, head_dim: int) -> tuple[int, int]:
    """Returns the tokens of a block of queries and of one of keys at most, on a device that has so many tokens.

    Keys have the larger one: a pair's queries are read and their sums written once for all of its keys.

    >>> most(4096, 128), most(8192, 128), most(16384, 128), most(2**20, 128)
    ((256, 256), (256, 512), (512, 512), (512, 512))
    """
    area = tokens * head_dim // SHARE
    keys = min(BLOCK, max(LEAST, 2 ** math.ceil(math.log2(area) / 2))) if area else LEAST
    return min(BLOCK, max(LEAST, area // keys)), keys


@dataclass(frozen=True)
class Blocks:
    """How a sequence, or each of its equal chunks, is cut in blocks of equal length.

    Attributes:
      tokens: Tokens of a chunk.
      count: Blocks of a chunk.
      size: Tokens of a block; count * size is tokens, or a few more that fill up the last block.
    """

    tokens: int
    count: int
    size: int

    @staticmethod
    def of(tokens: int, most: int = BLOCK) -> "Blocks":
        """Returns the fewest equal blocks of at most that many tokens."""
        count = -(-tokens // most)
        return Blocks(tokens, count, -(-tokens // count))

    def range(self, block: int) -> tuple[int, int]:
        """Returns the first and last position of a block in its chunk."""
        return block * self.size, min((block + 1) * self.size, self.tokens) - 1


def pairs(rule: Rule, queries: Blocks, keys: Blocks) -> np.ndarray:
    """Returns the pairs of blocks in which a query may see a key. Shape [pairs, 2]: block of queries, block of keys."""
    rows = [
        (i, j) for i in range(queries.count) for j in range(keys.count) if rule.reaches(queries.range(i), keys.range(j))
    ]
    return np.array(rows, np.int32).reshape(-1, 2)


def all_pairs(queries: Blocks, keys: Blocks) -> np.ndarray:
    """Returns all pairs of blocks. Shape [pairs, 2]."""
    return pairs(Rule(), queries, keys)
