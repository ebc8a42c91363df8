"""From how many tokens of a row on a form that travels is faster than gathered keys, and what each takes.

Of one layer, with r forward passes computed again, in s tokens of a row:

    gather    a s^2 + c s + l        a: the dense square, its scores through memory; c, l: what is left of the gathers
    travels   b s^2 + d s + m        b: half of it, where causal; d, m: blocks on the diagonal, doors, the way home
              + what is left of hops       none, where a turn takes longer than its hops; else b / P, and the hops
    both      what is kept for the backward pass goes to memory and back: scores too, of gathered keys

    a s^2 + c s + l = b s^2 + d s + m     s = (d - c + sqrt((d - c)^2 + 4 (a - b) (m - l))) / (2 (a - b))

Hops take the longer of the two, so a ring is faster from the larger of both roots on; never, where a <= b. The times
that this stands for are `seconds`, as a plan has them; tests find where they cross.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.layer_bytes import layer_bytes
from jaxpar.plan.model.layer_time import attention, elementwise, scores
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
    gathered = _gathered(shape, candidate, hardware, software)
    found = math.inf
    for few in (False, True):  # blocks on the diagonal that are full, or a chunk of less than one
        ways = _travelling(shape, candidate, hardware, software, few=few)
        root = max(_root(np.subtract(way, gathered)) for way in ways)
        whole = exchanged.BLOCK * int(exchanged.groups(candidate)) * (2 if shape.causal else 1)
        if few == (root < whole):
            return root
        found = min(found, max(root, float(whole)))
    return found


def _root(more: np.ndarray) -> float:
    """Returns from where on a polynomial of (square, linear, constant) coefficients is negative: for ever after."""
    square, linear, constant = map(float, more)
    if square >= 0:
        return math.inf
    inside = linear**2 - 4 * square * constant
    return 0.0 if inside < 0 else max(0.0, (linear + math.sqrt(inside)) / (-2 * square))


def _per_score(shape: Shape, candidate: Candidate, hardware: Hardware, own: SoftwareModel, *, far: bool) -> np.ndarray:
    """Returns the seconds of one score, in all forward passes and in the backward pass."""
    moved = np.divide(own.blocks if far else own.scores, hardware.chip.bandwidth * hardware.streaming)
    flop = 4 * shape.dim / shape.heads / hardware.chip.bf16_flops
    core = np.array([flop / own.core[0], flop * (2.5 if far else 2.0) / own.core[1]])
    again = np.array([1 + float(candidate.recomputed[1]), 1.0]), np.array([1 + float(candidate.recomputed[2]), 1.0])
    return again[0] * core + again[1] * moved


def _gathered(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    per_row = candidate.microbatch * shape.heads / candidate.context / candidate.tensor
    own = software.pieces or software
    kept = _kept(shape, replace(candidate, context_by="gather", ulysses=1), hardware, software)
    square = per_row * _per_score(shape, candidate, hardware, own, far=False).sum()
    size = 2 * BYTES * candidate.microbatch * shape.kv_dim / candidate.tensor
    alone, each = _affine(lambda size: hardware.gather(size, candidate.context, candidate.stride("context")))
    again = max(float(candidate.recomputed[1]), software.context_again)
    times = (1 - software.context_overlap) * (2 + again)
    return np.array([square, times * each * size, times * alone]) + kept


def _travelling(
    shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, few: bool
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the coefficients where all hops are hidden, and where computation hides behind them."""
    ring, ulysses, block = int(exchanged.groups(candidate)), candidate.ulysses, exchanged.BLOCK
    causal, again = shape.causal, 1 + float(candidate.recomputed[1])
    per_row = candidate.microbatch * shape.heads / candidate.context / candidate.tensor
    own = replace(software.pieces or software, blocks=software.blocks)
    each = per_row * _per_score(shape, candidate, hardware, own, far=True).sum()
    walk = _walk(ring, block, causal=causal, few=few)
    met = walk[0] * each + walk[1] * software.pair * (1 + again)
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
    turns = (ring - 1) / (ring + (0.5 if few and causal else 0.0)) * met * np.array([1.0, 0.0, 1.0])
    return hidden, hidden - turns + hops


def _walk(ring: int, block: int, *, causal: bool, few: bool) -> tuple[np.ndarray, np.ndarray]:
    """Returns coefficients of the scores that are met, per score of the square, and of the pairs of blocks."""
    chunks = 2 * ring if causal and ring > 1 else ring
    if few:  # a chunk is one block
        share = (2 * ring + 1) / (4 * ring) if chunks > ring else 1.0
        return np.array([share, 0.0, 0.0]), np.array([0.0, 0.0, 2.0 * ring + 1 if chunks > ring else ring])
    size = block * chunks  # tokens of a row with a block in each chunk
    if not causal:
        return np.array([1.0, 0.0, 0.0]), np.array([ring / size**2, 0.0, 0.0])
    if ring == 1:
        return np.array([0.5, block / 2, 0.0]), np.array([0.5 / size**2, 0.5 / size, 0.0])
    return np.array([0.5, size / (4 * ring), 0.0]), np.array([2 * ring / size**2, 1 / size, 0.0])


def _kept(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> np.ndarray:
    """Returns coefficients of the seconds in which what is kept for the backward pass is moved."""
    own = replace(software.pieces or software, relaid=0.0, pieces=None, blocks=software.blocks)
    one, two = (float(layer_bytes(replace(shape, seq=n), candidate, own)[0]) for n in (2**14, 2**15))
    square = (two - 2 * one) / 2**29
    bytes_ = np.array([square, one / 2**14 - square * 2**14, 0.0])
    return bytes_ * software.keep / (hardware.chip.bandwidth * hardware.streaming)


def _affine(price: Callable[[float], Any]) -> tuple[float, float]:
    """Returns what a collective takes of no bytes, and of each byte."""
    alone, far = float(price(0.0)), 1e9
    return alone, (float(price(far)) - alone) / far
