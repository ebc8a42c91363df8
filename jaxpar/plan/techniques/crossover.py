"""Seconds of each form of context parallelism, and the row length from which a ring or Ulysses beats gathered keys.

Seconds of one layer, with r recomputed forward passes, for rows of s tokens:

    gather         a s^2 + c s + l      a: the dense square, with scores through memory; c, l: exposed gathers
    ring, Ulysses  b s^2 + d s + m      b: half of it if causal; d, m: blocks on the diagonal, chunk permutes, last hop
                   + exposed hops       0 if hops are hidden; otherwise b is b / P, plus the hops
    all            residuals are written to memory and read back, including the scores of gathered keys

    a s^2 + c s + l = b s^2 + d s + m     s = (d - c + sqrt((d - c)^2 + 4 (a - b) (m - l))) / (2 (a - b))

A ring takes the longer of both cases, hidden and exposed hops, so it is faster above the larger root; never if a <= b.
Blocks, and the time of a pair, grow with the tokens: b, d and m hold over a range of tokens, and a root counts if it is
in its range. A fused kernel has no blocks and one range, except for the softmax in a: b is half of the square at the
kernel's share of the peak, d its loss on short sequences and the ops around it. These formulas approximate
`layer_seconds`, the times of a plan; tests compare their crossings.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate, recompute_shares
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.layer_bytes import layer_bytes
from jaxpar.plan.model.layer_time import attention, elementwise, pair, scores
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques.base import BYTES
from jaxpar.plan.techniques.table import block_seconds


def layer_seconds(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> float:
    """Returns the modelled seconds of a layer and microbatch without matmuls with weights, with exposed traffic."""
    core, traffic, ops = (cost(shape, candidate, hardware, software) for cost in (attention, scores, elementwise))
    shares = recompute_shares(candidate)
    recomputed = shares.attention * core[0] + shares.scores * traffic[0]
    exposed = block_seconds(shape, candidate, hardware, software)["context"]
    return float(np.sum([*core, *traffic, *ops, recomputed, *exposed]))


def crossover(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> float:
    """Returns the row length from which a ring or Ulysses is faster than gathered keys.

    Args:
      shape: Heads and widths; `seq` is ignored.
      candidate: The form, the devices, and the remat.
      hardware: The machines.
      software: Software model of the program.

    Returns:
      Tokens of a row, not rounded; infinity if it is never faster.
    """
    best = math.inf
    for start, tokens in reversed(_ranges(shape, candidate, software)):
        sized = replace(shape, seq=int(tokens))
        gathered = _gather_form_seconds(sized, candidate, hardware, software)
        polynomials = _travelling(sized, candidate, hardware, software)
        root = max(_root(np.subtract(polynomial, gathered)) for polynomial in polynomials)
        if root >= start:
            return min(root, best)
        best = start
    return best


def _ranges(shape: Shape, candidate: Candidate, software: SoftwareModel) -> list[tuple[float, float]]:
    """Returns (first tokens of a row, tokens inside) for every range with blocks of about one size.

    In the first range a chunk is a single block. Another range ends where the softmax is no longer one kernel.
    """
    softmax_split = (software.split_sequences or software).softmax_split[0]
    if ring_attention.uses_kernel(shape, candidate, software):
        starts = [0.0, *[float(softmax_split)] * bool(softmax_split)]
        return [(start, (start + end) / 2) for start, end in pairwise([*starts, 2 * starts[-1] or 2.0**20])]
    one_block, ring = _one_block_tokens(shape, candidate), int(ring_attention.groups(candidate))
    per_area = ring * ring_attention.SHARE / shape.head_width
    least_area, step = ring_attention.LEAST**2, 2 ** (1 / 4)  # blocks grow between 2 and 4 of these areas
    areas = [least_area, *(2 * least_area * step**n for n in range(5))]
    limits = {
        0.0,
        float(one_block),
        *(area * per_area for area in areas if area * per_area > one_block),
        *[float(softmax_split)] * bool(softmax_split),
    }
    starts = sorted(limits)
    return [(start, (start + end) / 2) for start, end in pairwise([*starts, 2 * starts[-1]])]


def _one_block_tokens(shape: Shape, candidate: Candidate) -> int:
    """Returns the most tokens of a row for which a chunk is one block."""
    ring = int(ring_attention.groups(candidate))
    return ring_attention.LEAST * ring * (2 if shape.causal and ring > 1 else 1)


def _root(more: np.ndarray) -> float:
    """Returns the point after which a polynomial, given as (square, linear, constant), stays negative."""
    square, linear, constant = map(float, more)
    if square >= 0:
        return math.inf
    discriminant = linear**2 - 4 * square * constant
    return 0.0 if discriminant < 0 else max(0.0, (linear + math.sqrt(discriminant)) / (-2 * square))


def _per_score(shape: Shape, candidate: Candidate, hardware: Hardware, own: SoftwareModel) -> float:
    """Returns the seconds per score of gathered keys, in all forward passes and the backward pass."""
    score_bytes = own.score(shape.seq, candidate, shape.kv_heads or shape.heads)
    traffic = np.divide(score_bytes, hardware.chip.bandwidth * hardware.streaming)
    flop = 4 * shape.head_width / hardware.chip.bf16_flops
    core = np.array([flop / own.core[0], flop * 2.0 / own.core[1]])
    repeats = (
        np.array([1 + float(recompute_shares(candidate).attention), 1.0]),
        np.array([1 + float(recompute_shares(candidate).scores), 1.0]),
    )
    return float((repeats[0] * core + repeats[1] * traffic).sum())


def _gather_form_seconds(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    per_row = candidate.microbatch * shape.heads / candidate.context / candidate.tensor
    variant = software.split_sequences or software
    residuals = _residuals(shape, replace(candidate, context_by="gather", ulysses=1), hardware, software)
    square = per_row * _per_score(shape, candidate, hardware, variant)
    size = 2 * BYTES * candidate.microbatch * shape.kv_dim / candidate.tensor
    fixed, per_byte = _affine(lambda size: hardware.gather(size, candidate.context, candidate.stride("context")))
    repeats = max(float(recompute_shares(candidate).attention), software.regather_context)
    times = (1 - software.context_overlap) * (2 + repeats)
    return np.array([square, times * per_byte * size, times * fixed]) + residuals


def _travelling(
    shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients with all hops hidden, and with hops that take longer than computation.

    They hold in the range that contains the shape's tokens.
    """
    ring, ulysses = int(ring_attention.groups(candidate)), candidate.ulysses
    causal, forwards = shape.causal, 1 + float(recompute_shares(candidate).attention)
    fused = bool(ring_attention.uses_kernel(shape, candidate, software))
    one_block = shape.seq < _one_block_tokens(shape, candidate) and not fused
    price_blocks = _kernel_terms if fused else _one_block_terms if one_block else _block_terms
    work = price_blocks(shape, candidate, hardware, software)
    tokens = BYTES * candidate.microbatch / candidate.context / candidate.tensor
    queries, keys = (
        tokens * shape.q_dim,
        tokens * shape.head_width * int(ring_attention.sent_kv_heads(shape, candidate)),
    )
    stride, passes = candidate.stride("context"), 1 + forwards
    hop, hop_byte = _affine(lambda size: hardware.send(size, stride, candidate.context))
    exchange, exchange_byte = _affine(
        lambda size: hardware.gather(size, ulysses, stride, members=hardware.members(ulysses, stride))
    )
    rotates = ring > 1
    linear = work[1] + rotates * 2 * hop_byte * keys + passes * 2 * exchange_byte * (queries + keys)
    constant = work[2] + rotates * 2 * hop + passes * 4 * exchange * (ulysses > 1)
    if rotates and causal:
        linear, constant = linear + passes * 2 * hop_byte * (queries + keys), constant + passes * 8 * hop
    hidden = np.array([work[0], linear, constant]) + _residuals(shape, candidate, hardware, software)
    hops = (ring - 1) * np.array([0.0, (2 * forwards + 6) * hop_byte * keys, (2 * forwards + 4) * hop])
    # in blocks, the linear term is that of blocks on the diagonal, of the device's own keys
    ring_steps = (
        (ring - 1) / (ring + (0.5 if one_block and causal else 0.0)) * work * np.array([1.0, float(fused), 1.0])
    )
    return hidden, hidden - ring_steps + hops


def _kernel_terms(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of all passes, with a fused kernel."""
    ring, parts = int(ring_attention.groups(candidate)), software.ring_kernel
    assert parts is not None  # the caller checks it
    shares = parts.kernel.shares.get(hardware.chip.key, software.core)
    width = shape.head_width
    heads, kv_heads = (float(count) for count in ring_attention.device_heads(shape, candidate))
    flop = 4 * heads * shape.head_width / (2 if shape.causal else 1) / hardware.chip.bf16_flops
    total = np.zeros(3)
    for way, times in ((0, 1 + float(recompute_shares(candidate).attention)), (1, 1.0)):
        core = flop * (1.0, 2.5)[way] / shares[way] * parts.kernel.slowdown(np.inf, width)
        traffic = parts.traffic(
            way, heads * width / ring, kv_heads * width / ring, ring=ring, ulysses=candidate.ulysses
        )
        linear = core * parts.kernel.short + float(hardware.stream(traffic))
        total += times * np.array([core / ring, linear, (ring - 1) * parts.small_kernels[way]])
    return total


def _block_terms(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of all passes, with blocks of the size that they have for the shape."""
    queries, keys = (float(size) for size in ring_attention.blocks(shape, candidate))
    scores = queries * keys * float(ring_attention.device_heads(shape, candidate)[0])
    core = [scores * per_pair for per_pair in _matmul_seconds(shape, hardware, software)]
    costs = [float(pair(shape, candidate, hardware, software, way, core[way])) + core[way] for way in (0, 1)]
    per_pair, ring = (
        (1 + float(recompute_shares(candidate).attention)) * costs[0] + costs[1],
        int(ring_attention.groups(candidate)),
    )
    if not shape.causal:
        return per_pair * np.array([1 / (ring * queries * keys), 0.0, 0.0])
    return per_pair * np.array([0.5 / (ring * queries * keys), 0.5 / (ring * queries), 0.0])


def _one_block_terms(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of all passes, if each chunk is one block."""
    ring, walk = int(ring_attention.groups(candidate)), software.pair_cost
    halves = shape.causal and ring > 1
    heads, kv_heads = (float(count) for count in ring_attention.device_heads(shape, candidate))
    head_dim, core, repeats = (
        shape.head_width,
        _matmul_seconds(shape, hardware, software),
        float(recompute_shares(candidate).attention),
    )
    total = np.zeros(3)
    for way, times in ((0, 1 + repeats), (1, 1)):
        square = float(hardware.stream(walk.traffic(way, heads, 0, 0))) + core[way] * heads
        linear = float(hardware.stream(walk.traffic(way, 0, heads * head_dim, kv_heads * head_dim)))
        total += times * np.array([square, linear, walk.pair])
    chunk = 1 / (2 * ring if halves else ring)  # tokens of a chunk, as a share of the sequence
    return (2 * ring + 1 if halves else ring) * total * np.array([chunk**2, chunk, 1.0])


def _matmul_seconds(shape: Shape, hardware: Hardware, software: SoftwareModel) -> tuple[float, float]:
    """Returns the seconds of the matmuls of one score, forward and backward."""
    variant, flop = software.split_sequences or software, 4 * shape.head_width / hardware.chip.bf16_flops
    return flop / variant.core[0], 2.5 * flop / variant.core[1]


def _residuals(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds of writing and reading residuals."""
    variant = replace(software.split_sequences or software, extra_score_copies=0.0, split_sequences=None)
    short, long = (float(layer_bytes(replace(shape, seq=n), candidate, variant)[0]) for n in (2**14, 2**15))
    square = (long - 2 * short) / 2**29
    bytes_ = np.array([square, short / 2**14 - square * 2**14, 0.0])
    return bytes_ * software.stacking_traffic / (hardware.chip.bandwidth * hardware.streaming)


def _affine(price: Callable[[float], Any]) -> tuple[float, float]:
    """Returns the seconds of a collective of 0 bytes, and the seconds per byte."""
    fixed, payload = float(price(0.0)), 1e9
    return fixed, (float(price(payload)) - fixed) / payload
