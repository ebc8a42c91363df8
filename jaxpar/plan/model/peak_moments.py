"""Bytes besides the training state at the fullest moments of a step of jaxpar's program, as XLA compiles it for GPUs.

    loss       the logits, overwritten by their gradient, and the gradient of the head
    backward   of one layer: its recomputed activations and workspace, and the gradients of layers that exist by then
    ends       the gradient of the embedding, unsharded, after all arrays of layers are freed

One program runs on all stages: slots, gradient sums and copies of parameters are as large on each stage as on the
fullest one, and every stage has logits. Counted in the buffers of compiled programs: `python -m tests.bench.memory`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxpar.models.settings.computing import CHUNK, LARGEST
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import ring_attention
from jaxpar.plan.model.layer_bytes import (
    SCORE,
    block_parameters,
    device_layer_parameters,
    head_shards,
    stage_parameters,
    updates_in_place,
)
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe

RECOMPUTED_SCORE = (
    13.0  # bytes per score: three arrays in float32 and a mask, as in buffers of programs compiled for H100s
)


class Moment(NamedTuple):
    """Bytes at a moment of a step; `has_residuals` is 1 while the residuals of layers exist."""

    gradients: Any
    logits: Any
    working: Any
    has_residuals: Any


class DeviceParameters(NamedTuple):
    """Parameters on a device before fsdp shards them (all, of layers, of one end), and the devices that share them."""

    all: Any
    layers: Any
    end: Any
    shards: Any

    @classmethod
    def of_layout(cls, shape: Shape, candidate: Candidate, software: SoftwareModel) -> "DeviceParameters":
        """Counts the parameters of a layout; ends that are spread over stages count as shares."""
        end = shape.vocab * shape.dim / candidate.tensor / head_shards(candidate)
        total = stage_parameters(shape, candidate, "last", spmd=True)
        return cls(total, block_parameters(shape, candidate), end, software.sharers(candidate))


def moments(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Iterator[Moment]:
    """Yields the moments of a step that may need the most bytes: loss, backward, ends."""
    parts, table = DeviceParameters.of_layout(shape, candidate, software), np.greater(candidate.pipe, 1)
    sharded = np.greater(parts.shards, 1)
    accumulates = np.greater(candidate.microbatches, 1) | table
    divisor = np.where(np.greater_equal(candidate.zero, 2), parts.shards, 1)
    # a pipeline with ZeRO-3 reduces once, after its table; with ZeRO-2 in every tick
    sum_shards = np.where(table & np.equal(candidate.zero, 3), 1, divisor)
    sums = np.where(accumulates, recipe.gradients * parts.all / sum_shards, 0.0)
    copies, end_gradient = _copies(shape, candidate, software, parts), software.wire[1] * parts.end

    # if all forwards precede the first backward, or with one microbatch, layers have no gradient sums yet at the loss
    early = table & (candidate.schedule_traits.forwards_first | np.equal(candidate.microbatches, 1))
    ends = np.where(
        np.greater(candidate.microbatches, 1), recipe.gradients * (2 - shape.tied) * parts.end / sum_shards, 0.0
    )
    chunks, logits = _logits(shape, candidate)
    head_sums = np.where(np.greater(chunks, 1), recipe.gradients * parts.end, 0.0)
    # ZeRO-3 gathers the head at a moment when no layer is gathered
    head = np.where(np.equal(candidate.zero, 3) & sharded & ~table, software.wire[0] * parts.end, 0.0)
    stream = 2.0 * candidate.microbatch * shape.seq / candidate.context * shape.dim
    # with several chunks a tick's forward, with or without a head, precedes another chunk's backward: the head's
    # gradient is masked there, and with ZeRO-2 scattered, before the last op that reads the logits
    masks = recipe.gradients * parts.end * (1 + np.where(np.equal(candidate.zero, 2) & sharded, 1 / divisor, 0.0))
    gradient = np.where(table & np.greater(candidate.chunks, 1), masks, end_gradient)
    yield Moment(np.where(early, ends, sums) + head_sums + gradient, logits, copies.all + head + 3 * stream, 1)

    # with ZeRO-2 every tick of a table scatters unsharded float32 gradients: of a whole chunk if ticks mix ops,
    # otherwise of one layer at a time; of the embedding or head, whose shard also exists
    scatters = np.where(table & np.equal(candidate.zero, 2) & sharded, recipe.gradients, 0.0)
    of_chunk = np.where(updates_in_place(candidate, software), 0.0, scatters * parts.layers / candidate.chunks)
    stack = _gradients_in_backward(shape, candidate, software, recipe, parts)
    stack = stack + np.where(table, 0.0, end_gradient / divisor)  # the head's gradient, until all are reduced
    work = copies.all + copies.layer + of_chunk + working_bytes(shape, candidate, software)
    yield Moment(sums + stack, 0.0, work, 1)

    of_end = scatters * (1 + 1 / divisor) * parts.end
    end_shard = recipe.gradients * parts.end / np.where(np.greater(candidate.zero, 0), parts.shards, 1)
    reduced_end = np.where(accumulates, 0.0, end_shard)
    gradient = np.where(table, 0.0, stack + reduced_end) + np.where(np.greater(scatters, 0), 0.0, end_gradient)
    yield Moment(sums + gradient, 0.0, copies.all + of_end, table)


def _logits(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns the number of chunks of the loss, and the bytes of logits that exist at once.

    Without chunks: logits in the dtype of matmuls, overwritten by their gradient. With chunks: both, of one chunk. With
    a head that is never chunked: all of both, which a softcap needs as compiled for H100s; a bias alone needs half.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    count = tokens * shape.vocab / candidate.tensor / head_shards(candidate)
    chunks = np.where(shape.chunked_head & np.greater(4 * count, LARGEST), np.ceil(4 * count / CHUNK), 1)
    whole = 2 * count if shape.chunked_head else 4 * count
    return chunks, np.where(np.greater(chunks, 1), 4 * count / chunks, whole)


def _gradients_in_backward(
    shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, parts: DeviceParameters
) -> Any:
    """Returns the bytes of layers' gradients during the backward pass, besides their sums.

    A scan over layers stacks them, in the dtype of the stored parameters, or of the copy that is gathered for a step. A
    pipeline stage adds each layer's gradient to its sum; if ticks mix ops, those of all layers at once.
    """
    for_a_step = np.greater_equal(candidate.zero, recipe.sharded_from) & np.less(candidate.zero, 3)
    light = for_a_step & np.greater(parts.shards, 1)
    single = np.equal(candidate.microbatches, 1) & np.greater_equal(candidate.zero, 1)
    sharded = single | np.greater_equal(candidate.zero, 2)
    scan = np.where(light, software.wire[1], recipe.gradients) * parts.layers / np.where(sharded, parts.shards, 1)
    layer = (software.wire[1] + recipe.gradients) * device_layer_parameters(shape, candidate.tensor)
    all_layers = software.wire[1] * parts.layers
    return np.where(
        np.greater(candidate.pipe, 1), np.where(updates_in_place(candidate, software), layer, all_layers), scan
    )


class Copies(NamedTuple):
    """Bytes of parameter copies for computation: copies that exist for the whole step, and copies of one layer."""

    all: Any
    layer: Any


def _copies(shape: Shape, candidate: Candidate, software: SoftwareModel, parts: DeviceParameters) -> Copies:
    """Returns the bytes of cast or gathered copies of parameters.

    A pipeline stage casts all its parameters once. Without a pipeline, ZeRO-1 and 2 gather all parameters once, and
    ZeRO-3 gathers a layer and the next; before its loop XLA transposes the shards of arrays whose last dim fsdp splits,
    to gather along the first dim. Without recomputation, ZeRO-3 keeps the gathered layers for the backward pass.
    """
    table, sharded = np.greater(candidate.pipe, 1), np.greater(parts.shards, 1)
    whole_step = table | (sharded & np.greater(candidate.zero, 0) & np.less(candidate.zero, 3))
    by_layer = np.equal(candidate.zero, 3) & sharded & ~table
    # fsdp splits the largest dim that tensor does not: the last of [embed, mlp] without tensor, of [mlp, embed] with it
    tensor_splits = np.greater(candidate.tensor, 1)
    inner = np.where(tensor_splits, shape.width, (1 + shape.gated) * shape.width) + shape.q_dim
    transposed = (shape.layers * shape.dim * inner / candidate.tensor + parts.end) / parts.shards
    keeps_layers = software.keeps_gathered(candidate)
    saved_bytes = np.where(keeps_layers, software.wire[0] * parts.layers, 0.0)
    return Copies(
        all=np.where(whole_step, software.wire[0] * parts.all, 0.0)
        + np.where(by_layer, 4 * transposed, 0.0)
        + saved_bytes,
        layer=np.where(
            by_layer & ~keeps_layers, 2 * software.wire[0] * device_layer_parameters(shape, candidate.tensor), 0.0
        ),
    )


def working_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns the bytes that one layer's backward needs besides residuals: for the feed-forward, and for scores.

    Feed-forward: the gradients of its inner arrays and of their product, these arrays if recomputed, and five arrays
    of the model dim. Unfused attention: the scores according to the software model, less the saved ones.
    """
    plain = software.cost(lambda variant: (_working(shape, candidate, variant),), candidate)[0]
    if not (rings := ring_attention.uses_ring(candidate)).any():
        return plain
    variant = replace(software.split_sequences or software, working_scores=0.0, saved_scores=(0.0, 0.0))
    return np.where(
        rings, _working(shape, candidate, variant) + ring_attention.backward_bytes(shape, candidate, software), plain
    )


def _working(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    hidden = 2 * tokens * shape.width / candidate.tensor
    projected = 2 * tokens * (2 * shape.q_dim + 2 * shape.kv_dim) / candidate.tensor
    recomputes = np.isin(candidate.remat, ("full", "offload"))
    stream = 10 * tokens * shape.dim
    forward = recomputes * ((1 + shape.gated) * hidden + projected) + (2 + shape.gated) * hidden + stream
    score = tokens * shape.heads * shape.seq / candidate.tensor
    rows, keys = candidate.microbatch, (shape.kv_heads or shape.heads) / candidate.tensor
    score_bytes = software.working_scores * (1 + software.extra_score_copies * np.greater(rows, keys) / 4)
    # all_dots also saves the results of attention's matmuls, unless sequences are split. A matmul reads a layer's
    # 16-bit attention weights from a copy, as they are saved in one array for all layers
    saved = np.where(
        np.equal(candidate.remat, "all_dots") & np.equal(candidate.context, 1), software.saved_scores[1], 0.0
    )
    saves_scores = np.equal(candidate.remat, "none") & (software.saved_scores[1] > 0)
    # backward matmuls copy a layer's scores out of the stack, which is row-major: `jaxpar.jaxprs.stack_layouts`
    score_bytes = np.where(saves_scores & np.equal(candidate.pipe, 1), software.working_scores, score_bytes)
    # a pipeline stage recomputes attention weights, their gradients and a mask from saved scores, and also copies the
    # scores if its buffers are updated in place. A split backward needs `software.working_scores` instead
    restored = RECOMPUTED_SCORE + SCORE * updates_in_place(candidate, software)
    score_bytes = np.where(
        saves_scores & np.greater(candidate.pipe, 1) & ~candidate.schedule_traits.split, restored, score_bytes
    )
    return forward + np.maximum(score_bytes - saved, 0.0) * score
