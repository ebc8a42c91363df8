"""Collectives of each form of context parallelism in closed form, and the FLOP of a ring.

                  forward                                        backward
    gather        all-gather of K, V                             reduce-scatter of their gradients
    ring          P - 1 permutes of K, V                         the same, P - 1 of gradients in float32, one back
      causal      and chunk permutes, once: q, K, V, out         their gradients
    ulysses       all_to_all of q, K, V, out                     of their gradients

For one layer on one device, for tests and readers; a plan prices many layouts at once, in `context.py`.
Sources: arXiv:2310.01889 (ring), arXiv:2407.21783, 3.3.2 (gather), arXiv:2309.14509 (all_to_all).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective

BF16, FP32 = 2, 4  # bytes


@dataclass(frozen=True, kw_only=True)
class LayerAttention:
    """One layer's attention on a device, before the context axis splits its sequences.

    Attributes:
      rows: Rows of a microbatch.
      seq: Tokens of a row.
      heads: Query heads on a device, after tensor parallelism.
      kv_heads: Heads of keys and of values.
      head_dim: Width of a head.
      context: Devices that share a row.
      ulysses: Devices of a group that exchange heads.
      causal: Whether the mask is causal.
    """

    rows: int = 1
    seq: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int
    ulysses: int = 1
    causal: bool = True

    @property
    def ring(self) -> int:
        """Number of groups between which keys rotate."""
        return self.context // self.ulysses

    def entries(self, heads: int) -> int:
        """Returns the elements of a device's shard [rows, seq / context, heads, head_dim]."""
        return self.rows * self.seq // self.context * heads * self.head_dim

    @property
    def sent_kv_heads(self) -> int:
        """Number of kv heads that are sent, with copies if there are fewer than `ulysses`."""
        return math.lcm(self.kv_heads, self.ulysses)


def gather_collectives(row: LayerAttention) -> Iterator[Collective]:
    """Yields the collectives of gathered keys in a layer, forward and backward."""
    size = BF16 * row.context * row.entries(row.kv_heads)
    for kind, backward in (("all-gather", False), ("reduce-scatter", True)):
        yield _bf16(kind, group=row.context, times=2, payload=size, backward=backward)


def ring_collectives(row: LayerAttention) -> Iterator[Collective]:
    """Yields the collectives of a ring, Ulysses, or both in a layer, forward and backward."""
    sizes = [BF16 * row.entries(heads) for heads in (row.heads, row.sent_kv_heads)]
    hops, permute = row.ring - 1, partial(_bf16, "collective-permute", group=row.ring)
    for backward in (False, True):
        if row.ulysses > 1:
            for size in sizes:
                yield _bf16("all-to-all", group=row.ulysses, times=2, payload=size, backward=backward)
        if hops:
            yield permute(times=2 * (hops + backward), payload=sizes[1], backward=backward)
        if hops and row.causal:  # two halves of each array; some of their chunks stay
            for size in sizes:
                yield permute(times=4, payload=size // 2, backward=backward, senders=float(moved_share(row.ring)))
    if hops:
        sums = permute(times=2 * hops, payload=sizes[1] * FP32 // BF16, backward=True)
        yield replace(sums, dtype="f32")


def moved_share(ring: np.ndarray | float) -> Any:
    """Returns the share of chunks that change their group in a causal ring's chunk permutes.

    Chunk c of 2P comes from group c // 2, and goes to group c or, if c >= P, to group 2P - 1 - c. Chunk 0 stays, and so
    does the late chunk with c // 2 = 2P - 1 - c, which exists unless 3 divides P.

    >>> float(moved_share(2)), float(moved_share(8))
    (0.5, 0.875)
    """
    stay = 1 + (np.remainder(ring, 3) != 0)
    return 1 - stay / (2 * np.asarray(ring))


def work_share(row: LayerAttention) -> float:
    """Returns a device's share of the dense square's FLOP; 1 without a causal mask.

    >>> work_share(LayerAttention(seq=64, heads=1, kv_heads=1, head_dim=1, context=8))
    0.53125
    """
    return (2 * row.ring + 1) / (4 * row.ring) if row.causal else 1.0


def _bf16(kind: str, **given: Any) -> Collective:
    return Collective(kind=kind, axes=("context",), dtype="bf16", **given)
