"""Attention over pieces of sequences that travel, in a ring or as heads for tokens: what a device computes and keeps.

Blocks of queries meet blocks of keys, pair by pair (`jaxpar/models/blocks`). Of P groups of a causal ring, each with an
early and a late chunk of n blocks, a device walks 2 n^2 pairs in a turn, and 2 n^2 + n of its own:

    share of the dense square     (2P + 1/n) / 4P     causal, P > 1      at most the (2P + 1) / 4P of whole chunks
                                  (n + 1) / 2n        causal, P = 1: heads for tokens alone
                                  1                   no mask

Nothing of a score is kept: q, k, v and the result as they are in the ring, and a logsumexp in float32.
Sources: arXiv:2310.01889 (ring), arXiv:2309.14509 (heads for tokens), arXiv:2205.14135 (blocks).
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.model.shape import Shape

BLOCK = 512  # tokens of a block at most, as `jaxpar.models.blocks.pairs.BLOCK`
SUM = 4  # bytes of what is summed over blocks: float32


def travels(candidate: Candidate) -> Any:
    """Returns whether pieces travel: sequences are cut, and keys are not gathered."""
    return np.greater(candidate.context, 1) & np.not_equal(candidate.context_by, "gather")


def groups(candidate: Candidate) -> Any:
    """Returns the groups of a ring, whose devices exchange heads; 1 where nothing rotates."""
    return np.where(travels(candidate), np.floor_divide(candidate.context, candidate.ulysses), 1)


def heads_of_keys(shape: Shape, candidate: Candidate) -> Any:
    """Returns the heads of keys that travel, of all of tensor: with copies, if fewer than devices exchange them."""
    heads, ways = shape.kv_heads or shape.heads, np.multiply(candidate.tensor, candidate.ulysses)
    return np.where(np.greater(candidate.ulysses, 1), np.lcm(heads, ways), heads)


def _blocks(shape: Shape, candidate: Candidate) -> Any:
    """Returns the blocks of a chunk, parts of one too; a ring cuts causal pieces in two chunks."""
    ring = groups(candidate)
    chunk = shape.seq / ring / np.where(shape.causal & np.greater(ring, 1), 2, 1)
    return np.maximum(chunk / BLOCK, 1.0)


def pairs(shape: Shape, candidate: Candidate) -> Any:
    """Returns the pairs of blocks that a device walks in a forward pass of a layer."""
    ring, n = groups(candidate), _blocks(shape, candidate)
    if not shape.causal:
        return ring * n**2
    return np.where(np.greater(ring, 1), 2 * ring * n**2 + n, n * (n + 1) / 2)


def walked(shape: Shape, candidate: Candidate) -> Any:
    """Returns the share of the dense square [seq / context, seq] that a device computes."""
    ring, n = groups(candidate), _blocks(shape, candidate)
    if not shape.causal:
        return np.ones_like(n)
    return np.where(np.greater(ring, 1), (2 * ring + 1 / n) / (4 * ring), (n + 1) / (2 * n))


def turn(shape: Shape, candidate: Candidate) -> Any:
    """Returns the share of a device's pairs that it walks while one piece travels."""
    ring, n = groups(candidate), _blocks(shape, candidate)
    return np.where(shape.causal & np.greater(ring, 1), 2 * n**2 / (2 * ring * n**2 + n), 1 / ring)


def kept_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns what a layer keeps besides its result: q, k, v and the result in the ring, and a logsumexp."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    width = 2 * shape.dim + 2 * shape.dim // shape.heads * heads_of_keys(shape, candidate)
    return tokens * (2 * width + SUM * shape.heads) / candidate.tensor


def worked_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns what a backward pass of a layer works with besides what it keeps.

    The gradient of the result in the ring; sums of three gradients in float32, of keys and values beside what has
    arrived and what is sent on; keys and values that have come and come next; four scores of a pair of blocks.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    keys = shape.dim // shape.heads * heads_of_keys(shape, candidate)
    moving = tokens * (2 * shape.dim + SUM * shape.dim + 3 * SUM * 2 * keys + 2 * 2 * 2 * keys)
    heads = shape.heads / np.where(travels(candidate), candidate.ulysses, 1)
    return (moving + 4 * SUM * candidate.microbatch * heads * BLOCK**2) / candidate.tensor
