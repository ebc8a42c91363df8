"""From how many tokens of a row on a form that travels is faster than gathered keys, and what each takes.

Of one layer, with r forward passes computed again, in s tokens of a row:

    gather    a s^2 + c s + l        a: the dense square, its scores through memory; c, l: what is left of the gathers
    travels   b s^2 + d s + m        b: half of it, where causal; d, m: blocks on the diagonal, doors, the way home
              + what is left of hops       none, where a turn takes longer than its hops; else b / P, and the hops
    both      what is kept for the backward pass goes to memory and back: scores too, of gathered keys

    a s^2 + c s + l = b s^2 + d s + m     s = (d - c + sqrt((d - c)^2 + 4 (a - b) (m - l))) / (2 (a - b))

Hops take the longer of the two, so a ring is faster from the larger of both roots on; never, where a <= b. Blocks grow
with the tokens, and what a pair of them takes with it: b, d and m hold over a range of tokens, and the root counts that
lies in its own. Where a kernel meets the pieces there are no blocks, and one range, but for a's softmax: b is half of
the square at the share that the kernel reaches, d what it loses of short pieces and what is made of its parts. The
times that this stands for are `seconds`, as a plan has them; tests find where they cross.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.layer_bytes import layer_bytes
from jaxpar.plan.model.layer_time import attention, elementwise, pair, scores
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.asked import of_blocks
from jaxpar.plan.techniques.base import BYTES


def seconds(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> float:
    """Returns the modelled seconds of a layer but for its matmuls with weights, of one microbatch, waits included."""
    core, through, rest = (cost(shape, candidate, hardware, software) for cost in (attention, scores, elementwise))
    again = candidate.recomputed[1] * core[0] + candidate.recomputed[2] * through[0]
    waits = of_blocks(shape, candidate, hardware, software)["context"]
    return float(np.sum([*core, *through, *rest, again, *waits]))


def crossover(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> float:
    """Returns from how many tokens on a form that travels is faster than gathered keys.

    Args:
      shape: Heads and widths; its tokens are not read.
      candidate: The form, the devices, and what is computed again.
      hardware: The nodes.
      software: How scores go.

    Returns:
      Tokens of a row, not rounded; infinity where it never is.
    """
    found = math.inf
    for low, inside in reversed(_ranges(shape, candidate, software)):
        here = replace(shape, seq=int(inside))
        gathered = _gathered(here, candidate, hardware, software)
        ways = _travelling(here, candidate, hardware, software)
        root = max(_root(np.subtract(way, gathered)) for way in ways)
        if root >= low:
            return min(root, found)
        found = low
    return found


def _ranges(shape: Shape, candidate: Candidate, software: SoftwareModel) -> list[tuple[float, float]]:
    """Returns (from so many tokens of a row on, tokens inside) for every range with blocks of one size, roughly.

    In the first of them a chunk is one block, as long as it is. Another ends where a softmax is one kernel no more.
    """
    split = (software.pieces or software).split[0]
    if exchanged.by_kernel(shape, candidate, software):
        found = [0.0, *[float(split)] * bool(split)]
        return [(low, (low + high) / 2) for low, high in pairwise([*found, 2 * found[-1] or 2.0**20])]
    one, ring = _one_block(shape, candidate), int(exchanged.groups(candidate))
    per_area = ring * exchanged.SHARE * shape.heads / shape.dim
    least, step = exchanged.LEAST**2, 2 ** (1 / 4)  # blocks grow from area 2 least on, to 4 least
    areas = [least, *(2 * least * step**n for n in range(5))]
    ends = {
        0.0,
        float(one),
        *(area * per_area for area in areas if area * per_area > one),
        *[float(split)] * bool(split),
    }
    found = sorted(ends)
    return [(low, (low + high) / 2) for low, high in pairwise([*found, 2 * found[-1]])]


def _one_block(shape: Shape, candidate: Candidate) -> int:
    """Returns the tokens of a row up to which a chunk is one block."""
    ring = int(exchanged.groups(candidate))
    return exchanged.LEAST * ring * (2 if shape.causal and ring > 1 else 1)


def _root(more: np.ndarray) -> float:
    """Returns from where on a polynomial of (square, linear, constant) coefficients is negative: for ever after."""
    square, linear, constant = map(float, more)
    if square >= 0:
        return math.inf
    inside = linear**2 - 4 * square * constant
    return 0.0 if inside < 0 else max(0.0, (linear + math.sqrt(inside)) / (-2 * square))


def _per_score(shape: Shape, candidate: Candidate, hardware: Hardware, own: SoftwareModel) -> float:
    """Returns the seconds of one score of gathered keys, in all forward passes and in the backward pass."""
    each = own.score(shape.seq, candidate, shape.kv_heads or shape.heads)
    moved = np.divide(each, hardware.chip.bandwidth * hardware.streaming)
    flop = 4 * shape.dim / shape.heads / hardware.chip.bf16_flops
    core = np.array([flop / own.core[0], flop * 2.0 / own.core[1]])
    again = np.array([1 + float(candidate.recomputed[1]), 1.0]), np.array([1 + float(candidate.recomputed[2]), 1.0])
    return float((again[0] * core + again[1] * moved).sum())


def _gathered(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    per_row = candidate.microbatch * shape.heads / candidate.context / candidate.tensor
    own = software.pieces or software
    kept = _kept(shape, replace(candidate, context_by="gather", ulysses=1), hardware, software)
    square = per_row * _per_score(shape, candidate, hardware, own)
    size = 2 * BYTES * candidate.microbatch * shape.kv_dim / candidate.tensor
    alone, each = _affine(lambda size: hardware.gather(size, candidate.context, candidate.stride("context")))
    again = max(float(candidate.recomputed[1]), software.context_again)
    times = (1 - software.context_overlap) * (2 + again)
    return np.array([square, times * each * size, times * alone]) + kept


def _travelling(
    shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients where all hops are hidden, and where computation hides behind them.

    They hold in the range that has the tokens of the shape.
    """
    ring, ulysses = int(exchanged.groups(candidate)), candidate.ulysses
    causal, again = shape.causal, 1 + float(candidate.recomputed[1])
    called = bool(exchanged.by_kernel(shape, candidate, software))
    few = shape.seq < _one_block(shape, candidate) and not called
    meet = _called if called else _alone if few else _walked
    met = meet(shape, candidate, hardware, software)
    tokens = BYTES * candidate.microbatch / candidate.context / candidate.tensor
    queries, keys = (
        tokens * shape.dim,
        tokens * shape.dim / shape.heads * int(exchanged.heads_of_keys(shape, candidate)),
    )
    stride, both = candidate.stride("context"), 1 + again
    sent, byte = _affine(lambda size: hardware.send(size, stride, candidate.context))
    swap, swapped = _affine(
        lambda size: hardware.gather(size, ulysses, stride, members=hardware.members(ulysses, stride))
    )
    rotates = ring > 1
    linear = met[1] + rotates * 2 * byte * keys + both * 2 * swapped * (queries + keys)
    constant = met[2] + rotates * 2 * sent + both * 4 * swap * (ulysses > 1)
    if rotates and causal:
        linear, constant = linear + both * 2 * byte * (queries + keys), constant + both * 8 * sent
    hidden = np.array([met[0], linear, constant]) + _kept(shape, candidate, hardware, software)
    hops = (ring - 1) * np.array([0.0, (2 * again + 6) * byte * keys, (2 * again + 4) * sent])
    # of blocks, what is linear in the tokens is those on the diagonal, of own keys
    turns = (ring - 1) / (ring + (0.5 if few and causal else 0.0)) * met * np.array([1.0, float(called), 1.0])
    return hidden, hidden - turns + hops


def _called(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of all passes, where a kernel meets the pieces."""
    ring, parts = int(exchanged.groups(candidate)), software.parts
    assert parts is not None  # or else it is not asked
    reached = parts.kernel.shares.get(hardware.chip.key, software.core)
    wide = shape.dim / shape.heads
    heads, kv_heads = (float(many) for many in exchanged.heads_here(shape, candidate))
    flop = 4 * heads * shape.dim / shape.heads / (2 if shape.causal else 1) / hardware.chip.bf16_flops
    found = np.zeros(3)
    for way, times in ((0, 1 + float(candidate.recomputed[1])), (1, 1.0)):
        core = flop * (1.0, 2.5)[way] / reached[way] * parts.kernel.lost(np.inf, wide)
        moved = parts.moved(way, heads * wide / ring, kv_heads * wide / ring, ring=ring, ulysses=candidate.ulysses)
        linear = core * parts.kernel.short + float(hardware.stream(moved))
        found += times * np.array([core / ring, linear, (ring - 1) * parts.small[way]])
    return found


def _walked(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of all passes, of blocks that are as long as those of the shape."""
    queries, keys = (float(size) for size in exchanged.blocks(shape, candidate))
    scores = queries * keys * float(exchanged.heads_here(shape, candidate)[0])
    core = [scores * each for each in _core(shape, hardware, software)]
    both = [float(pair(shape, candidate, hardware, software, way, core[way])) + core[way] for way in (0, 1)]
    each, ring = (1 + float(candidate.recomputed[1])) * both[0] + both[1], int(exchanged.groups(candidate))
    if not shape.causal:
        return each * np.array([1 / (ring * queries * keys), 0.0, 0.0])
    return each * np.array([0.5 / (ring * queries * keys), 0.5 / (ring * queries), 0.0])


def _alone(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of all passes, where a chunk is one block of as many tokens as it has."""
    ring, walk = int(exchanged.groups(candidate)), software.walk
    two = shape.causal and ring > 1
    heads, kv_heads = (float(many) for many in exchanged.heads_here(shape, candidate))
    wide, core, again = shape.dim / shape.heads, _core(shape, hardware, software), float(candidate.recomputed[1])
    found = np.zeros(3)
    for way, times in ((0, 1 + again), (1, 1)):
        square = float(hardware.stream(walk.moved(way, heads, 0, 0))) + core[way] * heads
        linear = float(hardware.stream(walk.moved(way, 0, heads * wide, kv_heads * wide)))
        found += times * np.array([square, linear, walk.pair])
    chunk = 1 / (2 * ring if two else ring)  # of the tokens of a row
    return (2 * ring + 1 if two else ring) * found * np.array([chunk**2, chunk, 1.0])


def _core(shape: Shape, hardware: Hardware, software: SoftwareModel) -> tuple[float, float]:
    """Returns the seconds of the matmuls of one score, forward and backward."""
    own, flop = software.pieces or software, 4 * shape.dim / shape.heads / hardware.chip.bf16_flops
    return flop / own.core[0], 2.5 * flop / own.core[1]


def _kept(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds in which what is kept for the backward pass is moved."""
    own = replace(software.pieces or software, relaid=0.0, pieces=None)
    one, two = (float(layer_bytes(replace(shape, seq=n), candidate, own)[0]) for n in (2**14, 2**15))
    square = (two - 2 * one) / 2**29
    bytes_ = np.array([square, one / 2**14 - square * 2**14, 0.0])
    return bytes_ * software.keep / (hardware.chip.bandwidth * hardware.streaming)


def _affine(price: Callable[[float], Any]) -> tuple[float, float]:
    """Returns what a collective takes of no bytes, and of each byte."""
    alone, far = float(price(0.0)), 1e9
    return alone, (float(price(far)) - alone) / far
