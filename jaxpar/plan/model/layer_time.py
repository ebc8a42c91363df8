"""Seconds of a block, and of the head, for one microbatch on one device: matmuls, attention, elementwise ops.

                 forward                        backward
    matmuls      4 of 2 tokens weights / t      8: gradients of inputs and of weights
    attention    4 tokens seq dim / t           twice that, or 5/2 if a fused kernel recomputes the scores
    elementwise  bytes of `SoftwareModel`       bytes of `SoftwareModel`, and gradient accumulation

t is the size of the tensor axis. Source of the divisions by t: Korthikanti et al. 2022, arXiv:2205.05198, appendix A.
"""

from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxpar.plan.candidate import Candidate, recompute_shares
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.layer_bytes import (
    device_layer_parameters,
    head_shards,
    host_bytes,
    layer_bytes,
    logit_chunks,
)
from jaxpar.plan.model.shape import Shape, attention_flop

SUM = 4  # bytes of an accumulated gradient: float32


class Cost(NamedTuple):
    """Seconds of a block or of the head for one microbatch on one device.

    Attributes:
      matmuls: Matmuls with weights.
      core: Matmuls of attention.
      scores: Reads and writes of unfused attention's scores.
      elementwise: All other ops, by their memory traffic.
    """

    matmuls: Any
    core: Any
    scores: Any
    elementwise: Any

    @property
    def total(self) -> Any:
        """Sum of all parts."""
        return self.matmuls + self.core + self.scores + self.elementwise


def tokens(shape: Shape, candidate: Candidate) -> Any:
    """Returns the tokens of one microbatch on one device: those of its replica / context."""
    return candidate.microbatch * shape.seq / candidate.context


def matmul_passes(
    rows: np.ndarray | float,
    inputs: np.ndarray | float,
    outputs: np.ndarray | float,
    hardware: Hardware,
    trained: float = 1.0,
) -> tuple[Any, Any]:
    """Returns the seconds of a matmul of `rows` with weights [inputs, outputs], forward and backward.

    The backward pass has the gradient of the inputs, and that of the `trained` share of the weights.
    """
    backward = hardware.matmul(rows, outputs, inputs) + trained * hardware.matmul(inputs, rows, outputs)
    return hardware.matmul(rows, inputs, outputs), backward


def matmuls(shape: Shape, candidate: Candidate, hardware: Hardware) -> tuple[Any, Any]:
    """Returns the seconds of a block's matmuls with weights: four in the forward pass, eight in the backward pass.

    The tensor axis splits the outputs of the first and third, and the inputs of the second and fourth.
    """
    count, shards = tokens(shape, candidate), candidate.tensor
    cuts = ((1, shards), (shards, 1)) * 2
    pairs = [
        matmul_passes(count, i / a, o / b, hardware, shape.trained)
        for (i, o), (a, b) in zip(shape.matrices, cuts, strict=True)
    ]
    forward, backward = zip(*pairs, strict=True)
    return sum(forward), sum(backward)


def attention(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the seconds of attention's matmuls, forward and backward.

    A fused kernel skips masked scores, and recomputes the scores in the backward pass: 5 matmuls for 2. Source: Dao
    2023, arXiv:2307.08691, section 3.1. Its share of the peak depends on chip, sequence length and head_dim.
    """
    dense = 1.0 * tokens(shape, candidate) * attention_flop(shape) / candidate.tensor
    peak = hardware.chip.bf16_flops

    def seconds(software: SoftwareModel) -> tuple[Any, Any]:
        fused = software.attention == "fused"
        flop = dense / 2 if fused and shape.causal else dense
        core_f, core_b = core = software.core
        if software.kernel:
            core_f, core_b = software.kernel.peak_shares(hardware.chip.key, shape.seq, shape.head_width, default=core)
        counts = (0, 0) if fused or software.block_kernels is None else software.block_kernels.matmuls
        fixed_f, fixed_b = (count * hardware.gemm.fixed(peak) for count in counts)
        return fixed_f + flop / (peak * core_f), fixed_b + flop * (2.5 if fused else 2.0) / (peak * core_b)

    forward, backward = software.cost(seconds, candidate)
    ring_mask, share = ring_attention.uses_ring(candidate), ring_attention.computed_share(shape, candidate)
    variant = software.split_sequences or software
    # a ring saves no scores, so its backward pass has 5 matmuls where the forward pass has 2
    ring = dense * share / (peak * variant.core[0]), 2.5 * dense * share / (peak * variant.core[1])
    if software.ring_kernel is not None:
        by_kernel, kernel = ring_attention.uses_kernel(shape, candidate, software), software.ring_kernel.kernel
        shares = kernel.shares.get(hardware.chip.key, software.core)
        loss = kernel.slowdown(shape.seq / ring_attention.groups(candidate), shape.head_width)
        kernel_flop = dense * loss / (2 if shape.causal else 1)
        kernel_seconds = kernel_flop / (peak * shares[0]), 2.5 * kernel_flop / (peak * shares[1])
        ring = (np.where(by_kernel, kernel_seconds[0], ring[0]), np.where(by_kernel, kernel_seconds[1], ring[1]))
    return np.where(ring_mask, ring[0], forward), np.where(ring_mask, ring[1], backward)


def scores(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the seconds of reading and writing the scores [rows, heads / t, seq, seq], forward and backward.

    For a ring or Ulysses: the time of a device's pairs of blocks besides their matmuls, or of the ops around a kernel.
    """
    count = 1.0 * tokens(shape, candidate) * shape.seq * shape.heads / candidate.tensor
    forward, backward = software.cost(
        lambda variant: tuple(
            size * count for size in variant.score(shape.seq, candidate, shape.kv_heads or shape.heads)
        ),
        candidate,
    )
    ring_mask = ring_attention.uses_ring(candidate)
    if not ring_mask.any():
        return hardware.stream(forward), hardware.stream(backward)
    pairs, core = ring_attention.pairs(shape, candidate), attention(shape, candidate, hardware, software)
    by_kernel = ring_attention.uses_kernel(shape, candidate, software)
    results = []
    for way, (size, core_seconds) in enumerate(zip((forward, backward), core, strict=True)):
        in_blocks = pairs * pair(shape, candidate, hardware, software, way, core_seconds / pairs)
        ring_seconds = np.where(by_kernel, ring_op_seconds(shape, candidate, hardware, software, way), in_blocks)
        results.append(np.where(ring_mask, ring_seconds, hardware.stream(size)))
    return results[0], results[1]


def ring_op_seconds(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel, way: int) -> Any:
    """Returns the seconds of the ops around a kernel in all iterations of a ring; way is 0 forward, 1 backward."""
    if software.ring_kernel is None:
        return 0.0
    ring, entries = ring_attention.groups(candidate), ring_attention.device_elements(shape, candidate)
    traffic = software.ring_kernel.traffic(way, *entries, ring=ring, ulysses=candidate.ulysses)
    return hardware.stream(traffic) + (ring - 1) * software.ring_kernel.small_kernels[way]


def pair(
    shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel, way: int, core: np.ndarray | float
) -> Any:
    """Returns the seconds of a pair of blocks besides its matmuls' `core`; way is 0 forward, 1 backward."""
    (queries, keys), (heads, kv_heads) = (
        ring_attention.blocks(shape, candidate),
        ring_attention.device_heads(shape, candidate),
    )
    head_dim, walk = shape.head_width, software.pair_cost
    traffic = walk.traffic(way, heads * queries * keys, heads * queries * head_dim, kv_heads * keys * head_dim)
    return np.maximum(walk.pair + hardware.stream(traffic), walk.least[way] - core)


def elementwise(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the seconds of a block's elementwise ops, forward, and backward with gradient accumulation.

    The tensor axis splits the widths inside a block; the activations between blocks only with sequence parallelism.
    Residuals are copied into the stack of all layers and back; a matmul writes a second layout of the scores without a
    copy. Host stalls (`host_stalls`) are added.
    """
    count = 1.0 * tokens(shape, candidate)
    stream = count * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    inner = count * (shape.q_dim + 2 * shape.kv_dim + shape.width * (1 + shape.gated)) / candidate.tensor
    forward, backward = (software.stream[i] * stream + software.inner[i] * inner for i in (0, 1))
    sums = accumulation_bytes(shape.trained * device_layer_parameters(shape, candidate.tensor), candidate, software)
    copied = np.where(np.greater(candidate.pipe, 1), 2, 1) * software.stacking_traffic

    def residuals(variant: SoftwareModel):
        stacked = variant.stacked_scores or variant.saved_scores
        plain = replace(variant, saved_scores=stacked, extra_score_copies=0.0, split_sequences=None)
        return layer_bytes(shape, candidate, plain)[:1]

    copy_bytes = copied / 2 * software.cost(residuals, candidate)[0]
    passes = (forward, copy_bytes, 0.0), (backward, copy_bytes, sums)
    return tuple(
        _kernel_seconds(shape, candidate, hardware, software, way, *amounts) + software.host_stalls[way]
        for way, amounts in enumerate(passes)
    )


def _kernel_seconds(
    shape: Shape,
    candidate: Candidate,
    hardware: Hardware,
    software: SoftwareModel,
    way: int,
    arrays: np.ndarray | float,
    stacks: np.ndarray | float,
    weights: np.ndarray | float,
) -> Any:
    """Returns the seconds of kernels that read and write this many bytes of arrays, stacks of residuals, and weights.

    Way is 0 forward, 1 backward. Each kernel takes at least as long as the smallest one.
    """
    kernels = software.block_kernels
    if kernels is None:
        return hardware.stream(arrays + stacks + weights)
    # with shards, microbatches or stages, weights in 16 bits exist for the whole step
    shared = np.greater(candidate.shards, 1)
    casts = ~shared & np.equal(candidate.microbatches, 1) & np.equal(candidate.pipe, 1)
    weights = weights + casts * kernels.cast_bytes * device_layer_parameters(shape, candidate.tensor)
    count = (6 + shape.gated) * (kernels.weights[way] + way * shared * kernels.around_collectives)
    stack_count = kernels.stacks * np.equal(candidate.remat, "none") * (1 - way)
    return (
        hardware.kernels(arrays, kernels.arrays[way])
        + hardware.kernels(stacks, stack_count)
        + hardware.kernels(weights, count)
        + hardware.kernels(0.0, kernels.numbers[way])
    )


def collective_copies(
    parameters: np.ndarray | float, candidate: Candidate, hardware: Hardware, software: SoftwareModel
) -> Any:
    """Returns the seconds of a step's copies of this many parameters and gradients around fsdp's collectives.

    A pipeline gathers and reduces outside of its table, without them.
    """
    if software.block_kernels is None:
        return 0.0
    shared = np.greater(candidate.shards, 1) & np.equal(candidate.pipe, 1)
    return hardware.stream(shared * software.block_kernels.copy_bytes * parameters)


def accumulation_bytes(parameters: np.ndarray | float, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the memory traffic of adding a microbatch's gradients of this many parameters to their sum.

    If gradients are reduced for each microbatch, ZeRO-2 and 3 add shards. A single microbatch has no sum, so ZeRO-1
    also scatters its gradients at once. If a copy of the parameters is gathered for a step (ZeRO-1 and 2), gradients
    have the dtype of that copy, not of the sum.
    """
    reduced = software.reduce_every_microbatch & ~(software.spmd & np.greater(candidate.pipe, 1))
    single = reduced & np.equal(candidate.microbatches, 1)
    light = reduced & np.isin(candidate.zero, (1, 2)) & np.greater(candidate.shards, 1)
    sharded = reduced & np.greater_equal(candidate.zero, np.where(single, 1, 2))
    cost = software.accumulate - np.where(light, SUM - software.wire[1], 0.0) - np.where(single, 2 * SUM, 0.0)
    return cost * parameters / np.where(sharded, candidate.shards, 1)


def pcie_seconds(hardware: Hardware) -> float:
    """Returns the seconds per byte to host memory, at the share of line rate that NVLink reaches; 0 if unknown."""
    chip = hardware.chip
    return chip.nvlink / hardware.inside.bandwidth / chip.pcie if chip.pcie else 0.0


def host_wait_seconds(shape: Shape, candidate: Candidate, hardware: Hardware, layer: tuple[Any, Any]) -> Any:
    """Returns the seconds of a step in which layers wait for copies of their inputs to host memory and back.

    Copies overlap with a layer's computation, whose seconds (forward, backward) are in `layer`; only the excess counts.
    """
    size = host_bytes(shape, candidate) / candidate.layers(shape.layers)
    copy = size * pcie_seconds(hardware)
    waits = sum(np.maximum(copy - compute, 0.0) for compute in layer)
    return np.where(np.greater(size, 0), waits * candidate.layers(shape.layers) * candidate.microbatches, 0.0)


def block(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Cost, Cost, Cost]:
    """Returns the costs of a block: forward, backward, and recomputed in the backward pass.

    XLA drops dead code from jaxpar's program: the last matmul, whose result is added to the residual stream, is not
    recomputed.
    """
    forward_matmuls, backward_matmuls = matmuls(shape, candidate, hardware)
    core, ops = (attention(shape, candidate, hardware, software), elementwise(shape, candidate, hardware, software))
    softmax = scores(shape, candidate, hardware, software)
    forward = Cost(forward_matmuls, core[0], softmax[0], ops[0])
    backward = Cost(backward_matmuls, core[1], softmax[1], ops[1])
    inputs, outputs = shape.matrices[-1]
    last = hardware.matmul(tokens(shape, candidate), inputs / candidate.tensor, outputs) if software.spmd else 0.0
    recomputable = forward._replace(matmuls=forward_matmuls - last)
    recomputation = Cost(
        *(share * cost for share, cost in zip(recompute_shares(candidate)[:4], recomputable, strict=True))
    )
    return forward, backward, recomputation


def head(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> tuple[Cost, Cost]:
    """Returns the costs of logits and loss, forward and backward, on the last stage or on each stage that shares them.

    The logits are split over the vocab, and large ones are computed in chunks of tokens, by the same matmuls.
    """
    count, vocab_shards = 1.0 * tokens(shape, candidate), candidate.tensor * head_shards(candidate)
    forward, backward = matmul_passes(count, shape.dim, shape.vocab / vocab_shards, hardware, shape.trained)
    loss = hardware.stream(software.logits * count * shape.vocab / vocab_shards)
    sums = hardware.stream(
        accumulation_bytes(shape.trained * shape.vocab * shape.dim / vocab_shards, candidate, software)
    )
    chunks = logit_chunks(count, shape.vocab / vocab_shards, software, chunked_head=shape.chunked_head)
    # each chunk reads and writes the sum of the head's gradient
    parameters = shape.trained * shape.vocab * shape.dim / vocab_shards
    sums = sums + hardware.stream(np.greater(chunks, 1) * 2 * SUM * chunks * parameters)
    return Cost(forward, 0.0, 0.0, loss / 2), Cost(backward, 0.0, 0.0, loss / 2 + sums)
