"""Attention over pieces of sequences that travel, in a ring or as heads for tokens: what a device computes and keeps.

Blocks of queries meet blocks of keys, pair by pair (`jaxpar/models/blocks`). Of P groups of a causal ring, each with an
early and a late chunk of m blocks of queries and n of keys, a device walks 2 m n pairs in a turn, and 2 m n + m of its
own:

    share of the dense square     (2P + 1/n) / 4P     causal, P > 1      at most the (2P + 1) / 4P of whole chunks
                                  (n + 1) / 2n        causal, P = 1: heads for tokens alone
                                  1                   no mask

The more tokens a group has, the larger are its blocks, up to `BLOCK`: fewer pairs, each with less to move per score.

Where cuDNN's kernel runs the parts there are no blocks: own pieces are one call, and squares of chunks others.

    share of the dense square     1/2                 causal: own pieces a half, and two of four chunks of each other
                                  1                   no mask

Nothing of a score is kept: q, k, v and the result as they are in the ring, and a logsumexp in float32.
Sources: arXiv:2310.01889 (ring), arXiv:2309.14509 (heads for tokens), arXiv:2205.14135 (blocks).
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape

# tokens of a block at most and at least, and entries of all queries for every score: as `jaxpar.models.blocks.pairs`
BLOCK, LEAST, SHARE = 512, 256, 8
SUM = 4  # bytes of what is summed over blocks: float32


def travels(candidate: Candidate) -> Any:
    """Returns whether pieces travel: sequences are cut, and keys are not gathered."""
    return np.greater(candidate.context, 1) & np.not_equal(candidate.context_by, "gather")


def by_kernel(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns whether pieces travel and a fused kernel meets them: heads of keys are cut as those of queries are."""
    whole = np.equal((shape.kv_heads or shape.heads) % candidate.tensor, 0)
    return travels(candidate) & whole & (software.parts is not None)


def groups(candidate: Candidate) -> Any:
    """Returns the groups of a ring, whose devices exchange heads; 1 where nothing rotates."""
    return np.where(travels(candidate), np.floor_divide(candidate.context, candidate.ulysses), 1)


def heads_of_keys(shape: Shape, candidate: Candidate) -> Any:
    """Returns the heads of keys that travel, of all of tensor: with copies, if fewer than devices exchange them."""
    return with_copies(shape, candidate.tensor, candidate.ulysses)


def with_copies(shape: Shape, tensor: Any, ulysses: Any) -> Any:
    """Returns the heads of keys that travel where so many devices exchange them, of all of tensor."""
    heads = shape.kv_heads or shape.heads
    return np.where(np.greater(ulysses, 1), np.lcm(heads, np.multiply(tensor, ulysses)), heads)


def most(tokens: Any, head_dim: Any) -> tuple[Any, Any]:
    """Returns the tokens of a block of queries and of one of keys at most, as `jaxpar.models.blocks.pairs.most`."""
    area = np.maximum(np.floor_divide(np.multiply(tokens, head_dim), SHARE), 1)
    keys = np.minimum(BLOCK, np.maximum(LEAST, 2 ** np.ceil(np.log2(area) / 2)))
    return np.minimum(BLOCK, np.maximum(LEAST, area // keys)), keys


def blocks(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the tokens of a block of queries and of one of keys; a chunk that is shorter is one block."""
    chunk = _chunk(shape, candidate)
    queries, keys = most(shape.seq / groups(candidate), shape.dim // shape.heads)
    return np.minimum(chunk, queries), np.minimum(chunk, keys)


def _chunk(shape: Shape, candidate: Candidate) -> Any:
    """Returns the tokens of a chunk: a ring cuts causal pieces in two."""
    ring = groups(candidate)
    return shape.seq / ring / np.where(shape.causal & np.greater(ring, 1), 2, 1)


def _counts(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the blocks of queries of a chunk, and those of keys, parts of one too."""
    chunk, (queries, keys) = _chunk(shape, candidate), blocks(shape, candidate)
    return chunk / queries, chunk / keys


def pairs(shape: Shape, candidate: Candidate) -> Any:
    """Returns the pairs of blocks that a device walks in a forward pass of a layer."""
    ring, (m, n) = groups(candidate), _counts(shape, candidate)
    if not shape.causal:
        return ring * m * n
    return np.where(np.greater(ring, 1), 2 * ring * m * n + m, m * (n + 1) / 2)


def walked(shape: Shape, candidate: Candidate) -> Any:
    """Returns the share of the dense square [seq / context, seq] that a device computes."""
    ring, (_, n) = groups(candidate), _counts(shape, candidate)
    if not shape.causal:
        return np.ones_like(n)
    return np.where(np.greater(ring, 1), (2 * ring + 1 / n) / (4 * ring), (n + 1) / (2 * n))


def turn(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the share of a device's work that it does while one piece travels: of the pairs that it walks, or equal
    ones of a kernel, to which the half of own pieces is as much as two of four squares.
    """
    ring, (_, n) = groups(candidate), _counts(shape, candidate)
    uneven = shape.causal & np.greater(ring, 1) & ~by_kernel(shape, candidate, software)
    return np.where(uneven, 2 * n / (2 * ring * n + 1), 1 / ring)


def entries(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the entries of a device's queries in the ring, of all rows of a microbatch, and those of its keys."""
    heads, kv_heads = heads_here(shape, candidate)
    each = shape.seq / groups(candidate) * (shape.dim / shape.heads)
    return heads * each, kv_heads * each


def heads_here(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the heads of queries that a device walks for all rows of a microbatch, and those of keys."""
    ways = candidate.tensor * np.where(travels(candidate), candidate.ulysses, 1)
    return candidate.microbatch * shape.heads / ways, candidate.microbatch * heads_of_keys(shape, candidate) / ways


def kept_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns what a layer keeps besides its result: q, k, v and the result in the ring, and a logsumexp."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    width = 2 * shape.dim + 2 * shape.dim // shape.heads * heads_of_keys(shape, candidate)
    return tokens * (2 * width + SUM * shape.heads) / candidate.tensor


def worked_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns what a backward pass of a layer works with besides what it keeps.

    The gradient of the result in the ring; sums of three gradients in float32, of keys and values beside what has
    arrived and what is sent on; keys and values that have come and come next; four scores of a pair of blocks.

    Where a kernel meets them, whose own workspace is not known, no scores, but of a chunk its queries, the result and
    the gradients of both; where nothing rotates, the gradients in 16 bits alone.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    keys = shape.dim // shape.heads * heads_of_keys(shape, candidate)
    moving = tokens * (2 * shape.dim + SUM * shape.dim + 3 * SUM * 2 * keys + 2 * 2 * 2 * keys)
    of_pair = heads_here(shape, candidate)[0] * np.multiply(*blocks(shape, candidate))
    around, alone = moving + tokens * 4 * shape.dim, tokens * (4 * shape.dim + 4 * keys)
    called = np.where(np.greater(groups(candidate), 1), around, alone) / candidate.tensor
    in_blocks = moving / candidate.tensor + 4 * SUM * of_pair
    return np.where(by_kernel(shape, candidate, software), called, in_blocks)
