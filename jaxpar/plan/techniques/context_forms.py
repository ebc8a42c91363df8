"""What each form of context parallelism sends and waits for, in closed form, and from how many tokens on a ring pays.

                  forward                                        backward
    gather        all-gather of K, V                             reduce-scatter of their gradients
    ring          P - 1 permutes of K, V                         the same, P - 1 of gradients in float32, one home
      causal      and through the door, once: q, K, V, out       their gradients
    ulysses       all_to_all of q, K, V, out                     of their gradients

A ring's turn takes as long as the slower of its sends and its matmuls: 2 of the 4 chunk pairs where causal. Gathered
keys are waited for first; scores of the whole square are then computed, half of them to be masked, and go to memory.
Sources: arXiv:2310.01889 (ring), arXiv:2407.21783, 3.3.2 (gather), arXiv:2309.14509 (all_to_all).
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from jaxpar.mesh.collective import Collective
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import JAXPAR, SoftwareModel

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
                yield permute(times=4, payload=size // 2, backward=backward, senders=moved(row.ring))
    if turns:
        sums = permute(times=2 * turns, payload=sizes[1] * FP32 // BF16, backward=True)
        yield replace(sums, dtype="f32")


def moved(ring: int) -> float:
    """Returns the share of chunks that go to another group at the door.

    >>> moved(2), moved(8)
    (0.5, 0.875)
    """
    home = [min(chunk, 2 * ring - 1 - chunk) for chunk in range(2 * ring)]
    return sum(chunk // 2 != there for chunk, there in enumerate(home)) / (2 * ring)


def work(row: Rows) -> float:
    """Returns the share of the dense square's FLOP that a device makes: 1 where all keys are gathered.

    >>> work(Rows(seq=64, heads=1, kv_heads=1, head_dim=1, context=8))
    0.53125
    """
    return (2 * row.ring + 1) / (4 * row.ring) if row.causal else 1.0


def seconds(row: Rows, form: str, hardware: Hardware, software: SoftwareModel = JAXPAR) -> float:
    """Returns the modelled seconds of one layer's attention, forward and backward, what is waited for among them.

    Args:
      row: The layer's attention.
      form: gather or ring.
      hardware: The nodes.
      software: Shares of the peak and bytes of scores, as of attention whose scores go to memory.
    """
    square = row.rows * row.seq**2 / row.context * row.heads
    share = 1.0 if form == "gather" else work(row)

    def compute(way: int) -> float:
        flop = 4 * square * row.head_dim * (1, 2.5)[way]
        core = flop / (hardware.chip.bf16_flops * software.core[way])
        return share * float(core + hardware.stream(software.scores[way] * square))

    if form == "gather":
        size = 2 * BF16 * row.context * row.entries(row.kv_heads)
        return sum(map(compute, (0, 1))) + 2 * float(hardware.gather(size, row.context, 1))
    total = 0.0
    for way in (0, 1):
        hop = _send(row, hardware, 2 * (BF16 + FP32 * way) * row.entries(row.kv_heads))
        turn = compute(way) * 2 / (2 * row.ring + 1) if row.causal else compute(way) / row.ring
        door = _send(row, hardware, BF16 * moved(row.ring) * row.entries(2 * row.heads + 2 * row.kv_heads))
        total += compute(way) - turn * (row.ring - 1) + (row.ring - 1) * max(hop, turn) + way * hop
        total += door if row.causal else 0.0
    return total


def crossover(row: Rows, hardware: Hardware, software: SoftwareModel = JAXPAR) -> int:
    """Returns from how many tokens of a row on a ring is faster than gathered keys; 0 where it never is."""
    least = 2 * row.context
    for tokens in least * 2 ** np.arange(0, 20, dtype=np.int64):
        longer = replace(row, seq=int(tokens))
        if seconds(longer, "ring", hardware, software) < seconds(longer, "gather", hardware, software):
            return int(tokens)
    return 0


def _send(row: Rows, hardware: Hardware, size: float) -> float:
    return float(hardware.send(size, 1, row.context))


def _bf16(kind: str, **given: Any) -> Collective:
    return Collective(kind=kind, axes=("context",), dtype="bf16", **given)
