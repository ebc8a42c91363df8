"""Ring attention and Ulysses: the work of a device in a layer, and the bytes that it saves.

A device computes attention in pairs of a block of queries and a block of keys (`jaxpar/models/blocks`). A causal ring
of P groups gives each group an early and a late chunk, of m blocks of queries and n of keys: a device computes 2 m n
pairs per iteration, and 2 m n + m pairs for its own keys:

    share of the dense square     (2P + 1/n) / 4P     causal, P > 1      at most the (2P + 1) / 4P of whole chunks
                                  (n + 1) / 2n        causal, P = 1: Ulysses alone
                                  1                   no mask

Blocks grow with the tokens of a group, up to `BLOCK`: fewer pairs, and less memory traffic per score.

cuDNN's kernel has no blocks: one call for a device's own chunks, and further calls for squares of chunks.

    share of the dense square     1/2                 causal: half of the own square, two of four chunks of others
                                  1                   no mask

No scores are saved: only q, k, v and the result in the ring's layout, and a logsumexp in float32.
Sources: arXiv:2310.01889 (ring), arXiv:2309.14509 (Ulysses), arXiv:2205.14135 (blocks).
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape

# most and fewest tokens of a block, and entries of all queries per score of a pair: as in `jaxpar.models.blocks.kernel`
BLOCK, LEAST, SHARE = 512, 256, 8
SUM = 4  # bytes of sums over blocks: float32


def uses_ring(candidate: Candidate) -> Any:
    """Whether a layout uses a ring or Ulysses: context is above 1 and keys are not gathered."""
    return np.greater(candidate.context, 1) & np.not_equal(candidate.context_by, "gather")


def uses_kernel(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Whether a fused kernel computes the ring or Ulysses: `tensor` has to divide the kv heads."""
    divisible = np.equal((shape.kv_heads or shape.heads) % candidate.tensor, 0)
    return uses_ring(candidate) & divisible & (software.ring_kernel is not None)


def groups(candidate: Candidate) -> Any:
    """Returns the groups between which keys rotate (Ulysses exchanges heads within a group); 1 without a ring."""
    return np.where(uses_ring(candidate), np.floor_divide(candidate.context, candidate.ulysses), 1)


def sent_kv_heads(shape: Shape, candidate: Candidate) -> Any:
    """Returns the number of kv heads to send, on all devices of `tensor` together, copies for Ulysses included."""
    return copied_kv_heads(shape, candidate.tensor, candidate.ulysses)


def copied_kv_heads(shape: Shape, tensor: np.ndarray | float, ulysses: np.ndarray | float) -> Any:
    """Returns the kv heads that this many Ulysses devices exchange, with copies, over all of `tensor`."""
    heads = shape.kv_heads or shape.heads
    return np.where(np.greater(ulysses, 1), np.lcm(heads, np.multiply(tensor, ulysses)), heads)


def largest_block(tokens: np.ndarray | float, head_dim: np.ndarray | float) -> tuple[Any, Any]:
    """Returns the most tokens in a block of queries and in one of keys: see `jaxpar.models.blocks.kernel`."""
    area = np.maximum(np.floor_divide(np.multiply(tokens, head_dim), SHARE), 1)
    keys = np.minimum(BLOCK, np.maximum(LEAST, 2 ** np.ceil(np.log2(area) / 2)))
    return np.minimum(BLOCK, np.maximum(LEAST, area // keys)), keys


def blocks(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the tokens of a block of queries and of a block of keys; a shorter chunk is one block."""
    chunk = _chunk(shape, candidate)
    queries, keys = largest_block(shape.seq / groups(candidate), shape.head_width)
    return np.minimum(chunk, queries), np.minimum(chunk, keys)


def _chunk(shape: Shape, candidate: Candidate) -> Any:
    """Returns the tokens of a chunk: a causal ring has two per group."""
    ring = groups(candidate)
    return shape.seq / ring / np.where(shape.causal & np.greater(ring, 1), 2, 1)


def _counts(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the (fractional) number of query blocks and of key blocks in a chunk."""
    chunk, (queries, keys) = _chunk(shape, candidate), blocks(shape, candidate)
    return chunk / queries, chunk / keys


def pairs(shape: Shape, candidate: Candidate) -> Any:
    """Returns the pairs of blocks that a device computes in a layer's forward pass."""
    ring, (m, n) = groups(candidate), _counts(shape, candidate)
    if not shape.causal:
        return ring * m * n
    return np.where(np.greater(ring, 1), 2 * ring * m * n + m, m * (n + 1) / 2)


def computed_share(shape: Shape, candidate: Candidate) -> Any:
    """Returns the share of the dense square [seq / context, seq] that a device computes."""
    ring, (_, n) = groups(candidate), _counts(shape, candidate)
    if not shape.causal:
        return np.ones_like(n)
    return np.where(np.greater(ring, 1), (2 * ring + 1 / n) / (4 * ring), (n + 1) / (2 * n))


def iteration_share(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the share of a device's work in one iteration of the ring.

    Without a kernel it follows from the pairs of blocks. With one all iterations have equal shares: half of a square of
    own chunks is as much work as two of four chunks.
    """
    ring, (_, n) = groups(candidate), _counts(shape, candidate)
    uneven = shape.causal & np.greater(ring, 1) & ~uses_kernel(shape, candidate, software)
    return np.where(uneven, 2 * n / (2 * ring * n + 1), 1 / ring)


def device_elements(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the array elements of a device's queries and of its keys in the ring, for a microbatch."""
    heads, kv_heads = device_heads(shape, candidate)
    per_head = shape.seq / groups(candidate) * shape.head_width
    return heads * per_head, kv_heads * per_head


def device_heads(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the query heads and the kv heads of a device, times the rows of a microbatch."""
    shards = candidate.tensor * np.where(uses_ring(candidate), candidate.ulysses, 1)
    return candidate.microbatch * shape.heads / shards, candidate.microbatch * sent_kv_heads(shape, candidate) / shards


def residual_bytes(shape: Shape, candidate: Candidate) -> Any:
    """Returns the bytes that a layer saves besides its result: q, k, v and the result in the ring, and a logsumexp."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    width = 2 * shape.q_dim + 2 * shape.head_width * sent_kv_heads(shape, candidate)
    return tokens * (2 * width + SUM * shape.heads) / candidate.tensor


def backward_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the bytes that a layer's backward pass needs besides its residuals.

    In blocks: the gradient of the result in the ring; float32 sums of the three gradients, those of keys and values
    also as received and as sent; the current and the next keys and values; four arrays of scores of a pair of blocks.

    With a kernel, whose workspace is unknown: no scores, but queries, result and their gradients of a chunk; without a
    ring only the gradients, in 16 bits.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    keys = shape.head_width * sent_kv_heads(shape, candidate)
    ring_arrays = tokens * (2 * shape.q_dim + SUM * shape.q_dim + 3 * SUM * 2 * keys + 2 * 2 * 2 * keys)
    pair_scores = device_heads(shape, candidate)[0] * np.multiply(*blocks(shape, candidate))
    in_ring, ulysses_alone = ring_arrays + tokens * 4 * shape.q_dim, tokens * (4 * shape.q_dim + 4 * keys)
    with_kernel = np.where(np.greater(groups(candidate), 1), in_ring, ulysses_alone) / candidate.tensor
    in_blocks = ring_arrays / candidate.tensor + 4 * SUM * pair_scores
    return np.where(uses_kernel(shape, candidate, software), with_kernel, in_blocks)
