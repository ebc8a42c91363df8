"""What each form of context parallelism sends, in closed form, and how much a ring computes.

                  forward                                        backward
    gather        all-gather of K, V                             reduce-scatter of their gradients
    ring          P - 1 permutes of K, V                         the same, P - 1 of gradients in float32, one home
      causal      and through the door, once: q, K, V, out       their gradients
    ulysses       all_to_all of q, K, V, out                     of their gradients

Of one layer on one device, for tests and readers; a plan prices many layouts at once, in `context.py`.
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
class Rows:
    """One layer's attention on a device, before the context axis cuts its sequences.

    Attributes:
      rows: Rows of a microbatch.
      seq: Tokens of a row.
      heads: Heads of queries on a device, that tensor parallelism leaves.
      kv_heads: Heads of keys.
      head_dim: Width of a head.
      context: Devices that share a row.
      ulysses: Those that exchange heads, in a ring.
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
        """Groups between which keys rotate."""
        return self.context // self.ulysses

    def entries(self, heads: int) -> int:
        """Returns the entries of an array with so many heads on a device: a piece of the tokens."""
        return self.rows * self.seq // self.context * heads * self.head_dim

    @property
    def exchanged(self) -> int:
        """Heads of keys that travel: with copies, where fewer than devices exchange them."""
        return math.lcm(self.kv_heads, self.ulysses)


def gathered(row: Rows) -> Iterator[Collective]:
    """Yields what gathered keys send in a layer, forward and backward."""
    size = BF16 * row.context * row.entries(row.kv_heads)
    for kind, backward in (("all-gather", False), ("reduce-scatter", True)):
        yield _bf16(kind, group=row.context, times=2, payload=size, backward=backward)


def exchanged(row: Rows) -> Iterator[Collective]:
    """Yields what a ring, heads for tokens, or both send in a layer, forward and backward."""
    sizes = [BF16 * row.entries(heads) for heads in (row.heads, row.exchanged)]
    turns, permute = row.ring - 1, partial(_bf16, "collective-permute", group=row.ring)
    for backward in (False, True):
        if row.ulysses > 1:
            for size in sizes:
                yield _bf16("all-to-all", group=row.ulysses, times=2, payload=size, backward=backward)
        if turns:
            yield permute(times=2 * (turns + backward), payload=sizes[1], backward=backward)
        if turns and row.causal:  # the door: two halves of each array, and some of their chunks stay
            for size in sizes:
                yield permute(times=4, payload=size // 2, backward=backward, senders=float(moved(row.ring)))
    if turns:
        sums = permute(times=2 * turns, payload=sizes[1] * FP32 // BF16, backward=True)
        yield replace(sums, dtype="f32")


def moved(ring: Any) -> Any:
    """Returns the share of chunks that go to another group at the door.

    Chunk c of 2P comes from group c // 2, and goes to c or, of the late ones, to 2P - 1 - c. The first one stays; of
    the late ones that of which c // 2 = 2P - 1 - c, which is there unless 3 divides P.

    >>> float(moved(2)), float(moved(8))
    (0.5, 0.875)
    """
    stay = 1 + (np.remainder(ring, 3) != 0)
    return 1 - stay / (2 * np.asarray(ring))


def work(row: Rows) -> float:
    """Returns the share of the dense square's FLOP that a device makes: 1 where all keys are gathered.

    >>> work(Rows(seq=64, heads=1, kv_heads=1, head_dim=1, context=8))
    0.53125
    """
    return (2 * row.ring + 1) / (4 * row.ring) if row.causal else 1.0


def _bf16(kind: str, **given: Any) -> Collective:
    return Collective(kind=kind, axes=("context",), dtype="bf16", **given)
