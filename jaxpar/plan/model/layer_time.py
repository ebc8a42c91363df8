"""Seconds of one microbatch on one device in one block, and in the head: matmuls, attention, elementwise ops.

                 forward                        backward
    matmuls      4 of 2 tokens weights / t      8: by the input and by the weights
    attention    4 tokens seq dim / t           twice that, or 5/2 where a fused kernel makes the scores again
    elementwise  bytes of `SoftwareModel`       bytes of `SoftwareModel`, and the sum of gradients

t is the tensor axis. Source: Korthikanti et al. 2022, arXiv:2205.05198, appendix A, for what t divides.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.layer_bytes import host_bytes, layer_bytes, logit_chunks
from jaxpar.plan.model.shape import Shape

SUM = 4  # bytes of a gradient's sum over microbatches: float32


class Cost(NamedTuple):
    """Seconds of one piece of the model for one microbatch on one device.

    Attributes:
      matmuls: Those with weights.
      core: Matmuls of attention.
      scores: Reads and writes of unfused attention's scores.
      elementwise: All other ops, by their bytes of memory.
    """

    matmuls: Any
    core: Any
    scores: Any
    elementwise: Any

    @property
    def total(self) -> Any:
        """All of it."""
        return self.matmuls + self.core + self.scores + self.elementwise


def tokens(shape: Shape, candidate: Candidate) -> Any:
    """Returns the tokens of one microbatch on one device: those of its replica, over the context axis."""
    return candidate.microbatch * shape.seq / candidate.context


def both_ways(rows: Any, inputs: Any, outputs: Any, hardware: Hardware, trained: float = 1.0) -> tuple[Any, Any]:
    """Returns the seconds of a matmul of `rows` with weights [inputs, outputs], forward and backward.

    Of the two going backward, the one by the weights is of the share of them that is `trained`.
    """
    backward = hardware.matmul(rows, outputs, inputs) + trained * hardware.matmul(inputs, rows, outputs)
    return hardware.matmul(rows, inputs, outputs), backward


def matmuls(shape: Shape, candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the seconds of a block's matmuls with weights, four going forward and eight going backward.

    The tensor axis cuts the outputs of the first and third, and the inputs of the second and fourth.
    """
    count, ways = tokens(shape, candidate), candidate.tensor
    cuts = ((1, ways), (ways, 1)) * 2
    pairs = [
        both_ways(count, i / a, o / b, hardware, shape.trained)
        for (i, o), (a, b) in zip(shape.matrices, cuts, strict=True)
    ]
    forward, backward = zip(*pairs, strict=True)
    return sum(forward), sum(backward)


def attention(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the seconds of attention's matmuls, forward and backward.

    A fused kernel leaves out what the causal mask hides and makes the scores again going backward: 5 matmuls for 2.
    Source: Dao 2023, arXiv:2307.08691, section 3.1. Its share of the peak is its own on this chip, at this length and
    width of a head.
    """
    every = 1.0 * tokens(shape, candidate) * shape.core_flop / candidate.tensor
    peak = hardware.chip.bf16_flops

    def seconds(software: SoftwareModel) -> tuple[Any, Any]:
        fused = software.attention == "fused"
        flop = every / 2 if fused and shape.causal else every
        ahead, back = core = software.core
        if software.kernel:
            ahead, back = software.kernel.core(hardware.chip.key, shape.seq, shape.dim / shape.heads, other=core)
        return flop / (peak * ahead), flop * (2.5 if fused else 2.0) / (peak * back)

    forward, backward = software.cost(seconds, candidate)
    far, share = exchanged.travels(candidate), exchanged.walked(shape, candidate)
    own = software.pieces or software
    there = every * share / (peak * own.core[0]), 2.5 * every * share / (peak * own.core[1])  # no score is kept
    if software.parts is not None:
        called, by = exchanged.by_kernel(shape, candidate, software), software.parts.kernel
        reached = by.shares.get(hardware.chip.key, software.core)
        lost = by.lost(shape.seq / exchanged.groups(candidate), shape.dim / shape.heads)
        seen = every * lost / (2 if shape.causal else 1)
        by_it = seen / (peak * reached[0]), 2.5 * seen / (peak * reached[1])
        there = np.where(called, by_it[0], there[0]), np.where(called, by_it[1], there[1])
    return np.where(far, there[0], forward), np.where(far, there[1], backward)


def scores(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the seconds of reading and writing the scores [rows, heads / t, seq, seq], forward and backward.

    Where pieces travel, what the pairs of blocks that a device walks take besides their matmuls, or what is made of
    the results of a kernel.
    """
    count = 1.0 * tokens(shape, candidate) * shape.seq * shape.heads / candidate.tensor
    forward, backward = software.cost(
        lambda own: tuple(size * count for size in own.score(shape.seq, candidate, shape.kv_heads or shape.heads)),
        candidate,
    )
    far = exchanged.travels(candidate)
    if not far.any():
        return hardware.stream(forward), hardware.stream(backward)
    pairs, core = exchanged.pairs(shape, candidate), attention(shape, candidate, hardware, software)
    called = exchanged.by_kernel(shape, candidate, software)
    found = []
    for way, (size, each) in enumerate(zip((forward, backward), core, strict=True)):
        walked = pairs * pair(shape, candidate, hardware, software, way, each / pairs)
        there = np.where(called, made_of_parts(shape, candidate, hardware, software, way), walked)
        found.append(np.where(far, there, hardware.stream(size)))
    return found[0], found[1]


def made_of_parts(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel, way: int) -> Any:
    """Returns the seconds of what is made of a kernel's parts in all turns; way is 0 going forward, 1 backward."""
    if software.parts is None:
        return 0.0
    ring, entries = exchanged.groups(candidate), exchanged.entries(shape, candidate)
    moved = software.parts.moved(way, *entries, ring=ring, ulysses=candidate.ulysses)
    return hardware.stream(moved) + (ring - 1) * software.parts.small[way]


def pair(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel, way: int, core: Any) -> Any:
    """Returns the seconds of a pair of blocks besides the `core` of its matmuls; way is 0 going forward, 1 backward."""
    (queries, keys), (heads, kv_heads) = exchanged.blocks(shape, candidate), exchanged.heads_here(shape, candidate)
    wide, walk = shape.dim / shape.heads, software.walk
    moved = walk.moved(way, heads * queries * keys, heads * queries * wide, kv_heads * keys * wide)
    return np.maximum(walk.pair + hardware.stream(moved), walk.least[way] - core)


def elementwise(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the seconds of a block's elementwise ops, forward and backward with the sum of gradients.

    The tensor axis cuts the widths inside; the stream between blocks only where it is sharded by sequence. What is kept
    goes to the other layers' and comes back; a second order of the scores is what their matmul writes. Where the host
    launches no kernel before the last one ended, its time comes on top.
    """
    count = 1.0 * tokens(shape, candidate)
    stream = count * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    inner = count * (shape.dim + 2 * shape.kv_dim + shape.width * (1 + shape.gated)) / candidate.tensor
    forward, backward = (software.stream[i] * stream + software.inner[i] * inner for i in (0, 1))
    sums = summed(shape.trained * shape.cut_layer(candidate.tensor), candidate, software)
    copied = np.where(np.greater(candidate.pipe, 1), 2, 1) * software.keep
    once = lambda own: layer_bytes(shape, candidate, replace(own, relaid=0.0, pieces=None))[:1]  # noqa: E731
    beside = copied / 2 * software.cost(once, candidate)[0]
    waits = software.waits
    return hardware.stream(forward + beside) + waits[0], hardware.stream(backward + beside + sums) + waits[1]


def summed(parameters: Any, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the bytes of adding a microbatch's gradients of so many parameters to their sum.

    Where each microbatch's are reduced, those of stages 2 and 3 are shards by then. A lone microbatch has no sum, so
    stage 1 scatters its gradients at once too. Where a copy of the parameters is gathered for a step, in stages 1 and
    2, gradients have its dtype, not the sum's.
    """
    reduced = software.eager & ~(software.everywhere & np.greater(candidate.pipe, 1))
    alone = reduced & np.equal(candidate.microbatches, 1)
    copied = reduced & np.isin(candidate.zero, (1, 2)) & np.greater(candidate.shards, 1)
    sharded = reduced & np.greater_equal(candidate.zero, np.where(alone, 1, 2))
    each = software.accumulate - np.where(copied, SUM - software.wire[1], 0.0) - np.where(alone, 2 * SUM, 0.0)
    return each * parameters / np.where(sharded, candidate.shards, 1)


def pcie_seconds(hardware: Hardware) -> float:
    """Returns the seconds of a byte to host memory, at the share of line rate that NVLink reaches; 0 where unknown."""
    chip = hardware.chip
    return chip.nvlink / hardware.inside.bandwidth / chip.pcie if chip.pcie else 0.0


def on_host(shape: Shape, candidate: Candidate, hardware: Hardware, layer: tuple[Any, Any]) -> Any:
    """Returns the seconds of a step in which a layer waits for its input on its way to host memory, or back.

    Copies run beside a layer's computation each way, of which `layer` has the seconds, and the slower of both counts.
    """
    size = host_bytes(shape, candidate) / candidate.layers(shape.layers)
    once = size * pcie_seconds(hardware)
    waits = sum(np.maximum(once - each, 0.0) for each in layer)
    return np.where(np.greater(size, 0), waits * candidate.layers(shape.layers) * candidate.microbatches, 0.0)


def block(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Cost, Cost, Cost]:
    """Returns what a block costs forward, backward, and in what the backward computes again.

    Of jaxpar's own program XLA drops what nobody reads: the last matmul, whose result is summed with the stream, is not
    computed again.
    """
    once, twice = matmuls(shape, candidate, hardware)
    core, other = attention(shape, candidate, hardware, software), elementwise(shape, candidate, hardware, software)
    softmax = scores(shape, candidate, hardware, software)
    forward = Cost(once, core[0], softmax[0], other[0])
    backward = Cost(twice, core[1], softmax[1], other[1])
    inputs, outputs = shape.matrices[-1]
    last = hardware.matmul(tokens(shape, candidate), inputs / candidate.tensor, outputs) if software.everywhere else 0.0
    made = forward._replace(matmuls=once - last)
    again = Cost(*(share * cost for share, cost in zip(candidate.recomputed[:4], made, strict=True)))
    return forward, backward, again


def head(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Cost, Cost]:
    """Returns what logits and loss cost forward and backward, on the last stage or on each that shares them.

    The logits are cut over the vocab, and where they are many made in chunks of tokens, by the same matmuls.
    """
    count, ways = 1.0 * tokens(shape, candidate), candidate.tensor * candidate.sharing
    once, twice = both_ways(count, shape.dim, shape.vocab / ways, hardware, shape.trained)
    loss = hardware.stream(software.logits * count * shape.vocab / ways)
    sums = hardware.stream(summed(shape.trained * shape.vocab * shape.dim / ways, candidate, software))
    chunks = logit_chunks(count, shape.vocab / ways, software)
    # each chunk reads the sum of the head's gradient and writes it
    whole = shape.trained * shape.vocab * shape.dim / ways
    sums = sums + hardware.stream(np.greater(chunks, 1) * 2 * SUM * chunks * whole)
    return Cost(once, 0.0, 0.0, loss / 2), Cost(twice, 0.0, 0.0, loss / 2 + sums)
