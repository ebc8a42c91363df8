"""The fullest moments of a step of jaxpar's own, as XLA compiles it for GPUs: what each has beside the state.

    loss       the logits, in whose place their gradient is made, and the gradient of the head
    backward   of one layer: what it makes again and works with, beside the gradients of layers that are there by then
    ends       the gradient of the embedding, whole, when all of a layer's arrays are gone

One program runs on all stages: slots, sums and copies of parameters are as large on each as on the one that needs
most, and every stage has logits. Counted in the buffers of compiled programs: `python -m tests.bench.memory`.
"""

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from jaxpar.models.settings.logits import CHUNK, LARGEST
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import exchanged
from jaxpar.plan.model.layer_bytes import SCORE, block_parameters, in_place, stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe

RESTORED = 13.0  # bytes per score: three arrays in float32 and a mask, as in buffers of programs compiled for H100s


class Moment(NamedTuple):
    """Bytes at a moment: `kept` says whether what layers keep is still there."""

    gradients: Any
    logits: Any
    working: Any
    kept: Any


class Parts(NamedTuple):
    """Parameters on a device before they are sharded: all, those of its layers, those of each end of the model.

    And how many devices share what fsdp shards.
    """

    all: Any
    layers: Any
    end: Any
    shards: Any

    @classmethod
    def of(cls, shape: Shape, candidate: Candidate, software: SoftwareModel) -> "Parts":
        """Returns those of a layout; ends that are spread over stages are shares."""
        end = shape.vocab * shape.dim / candidate.tensor / candidate.sharing
        whole = stage_parameters(shape, candidate, "last", everywhere=True)
        return cls(whole, block_parameters(shape, candidate), end, software.sharers(candidate))


def moments(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Iterator[Moment]:
    """Yields the moments of a step that may need most."""
    parts, table = Parts.of(shape, candidate, software), np.greater(candidate.pipe, 1)
    over = np.greater(parts.shards, 1)
    several = np.greater(candidate.microbatches, 1) | table
    ways = np.where(np.greater_equal(candidate.zero, 2), parts.shards, 1)
    # around a table stage 3 reduces once, after it; stage 2 in every tick
    shared = np.where(table & np.equal(candidate.zero, 3), 1, ways)
    sums = np.where(several, recipe.gradients * parts.all / shared, 0.0)
    copies, short = _copies(shape, candidate, software, parts), software.wire[1] * parts.end

    # where all forwards come before the first backward, layers have no sums yet at the loss; nor has a lone microbatch
    early = table & (candidate.forwards_first | np.equal(candidate.microbatches, 1))
    ends = np.where(
        np.greater(candidate.microbatches, 1), recipe.gradients * (2 - shape.tied) * parts.end / shared, 0.0
    )
    chunks, logits = _logits(shape, candidate)
    summed = np.where(np.greater(chunks, 1), recipe.gradients * parts.end, 0.0)
    # in stage 3 the head is gathered alone, and with it nothing of the layers
    head = np.where(np.equal(candidate.zero, 3) & over & ~table, software.wire[0] * parts.end, 0.0)
    stream = 2.0 * candidate.microbatch * shape.seq / candidate.context * shape.dim
    # of several chunks a tick's forward, with a head or without one, has another chunk's backward after it: there the
    # head's gradient is masked, and in stage 2 scattered, before all that reads the logits is done
    masked = recipe.gradients * parts.end * (1 + np.where(np.equal(candidate.zero, 2) & over, 1 / ways, 0.0))
    made = np.where(table & np.greater(candidate.chunks, 1), masked, short)
    yield Moment(np.where(early, ends, sums) + summed + made, logits, copies.all + head + 3 * stream, 1)

    # in stage 2 every tick of a table scatters, in float32, what is whole until then: of a chunk where ticks mix ops,
    # else a layer at a time; of an end, beside its shard
    scatters = np.where(table & np.equal(candidate.zero, 2) & over, recipe.gradients, 0.0)
    of_chunk = np.where(in_place(candidate, software), 0.0, scatters * parts.layers / candidate.chunks)
    stack = _while_made(shape, candidate, software, recipe, parts)
    stack = stack + np.where(table, 0.0, short / ways)  # the head's, until all are reduced
    work = copies.all + copies.layer + of_chunk + working(shape, candidate, software)
    yield Moment(sums + stack, 0.0, work, 1)

    of_end = scatters * (1 + 1 / ways) * parts.end
    reduced = recipe.gradients * parts.end / np.where(np.greater(candidate.zero, 0), parts.shards, 1)
    once = np.where(several, 0.0, reduced)
    made = np.where(table, 0.0, stack + once) + np.where(np.greater(scatters, 0), 0.0, short)
    yield Moment(sums + made, 0.0, copies.all + of_end, table)


def _logits(shape: Shape, candidate: Candidate) -> tuple[Any, Any]:
    """Returns in how many chunks the loss makes its logits, and the bytes of those that are there at once.

    Whole ones in the dtype of matmuls, and their gradient in their place; of a chunk both.
    """
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    count = tokens * shape.vocab / candidate.tensor / candidate.sharing
    chunks = np.where(4 * count > LARGEST, np.ceil(4 * count / CHUNK), 1)
    return chunks, np.where(np.greater(chunks, 1), 4 * count / chunks, 2 * count)


def _while_made(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, parts: Parts) -> Any:
    """Returns the bytes of gradients of layers while they are made, beside their sums.

    A scan over layers stacks them, in the dtype of what they are gradients of: of stored parameters, or of the copy
    that is gathered for a step. A stage adds up each layer's, as its matmul leaves it; where ticks mix ops, those of
    all at once.
    """
    for_a_step = np.greater_equal(candidate.zero, recipe.since) & np.less(candidate.zero, 3)
    light = for_a_step & np.greater(parts.shards, 1)
    alone = np.equal(candidate.microbatches, 1) & np.greater_equal(candidate.zero, 1)
    sharded = alone | np.greater_equal(candidate.zero, 2)
    scan = np.where(light, software.wire[1], recipe.gradients) * parts.layers / np.where(sharded, parts.shards, 1)
    one = (software.wire[1] + recipe.gradients) * shape.cut_layer(candidate.tensor)
    every = software.wire[1] * parts.layers
    return np.where(np.greater(candidate.pipe, 1), np.where(in_place(candidate, software), one, every), scan)


class Copies(NamedTuple):
    """Copies of parameters to compute with: those that are there for all of a step, and those of a layer in turn."""

    all: Any
    layer: Any


def _copies(shape: Shape, candidate: Candidate, software: SoftwareModel, parts: Parts) -> Copies:
    """Returns the bytes of parameters made ready to compute with.

    A stage casts all that it has, once. Alone, stages 1 and 2 gather all, once, and stage 3 a layer and the next; of
    the arrays whose last dim fsdp splits XLA lays all shards the other way before its loop, to gather along the first.
    Where nothing is recomputed, stage 3 keeps all that it has gathered for the backward pass.
    """
    table, over = np.greater(candidate.pipe, 1), np.greater(parts.shards, 1)
    once = table | (over & np.greater(candidate.zero, 0) & np.less(candidate.zero, 3))
    by_layer = np.equal(candidate.zero, 3) & over & ~table
    # fsdp takes the largest dim that tensor leaves: of [embed, mlp] the last one alone, of [mlp, embed] with tensor
    split = np.greater(candidate.tensor, 1)
    inner = np.where(split, shape.width, (1 + shape.gated) * shape.width) + shape.dim
    turned = (shape.layers * shape.dim * inner / candidate.tensor + parts.end) / parts.shards
    keeps = software.keeps_gathered(candidate)
    kept = np.where(keeps, software.wire[0] * parts.layers, 0.0)
    return Copies(
        all=np.where(once, software.wire[0] * parts.all, 0.0) + np.where(by_layer, 4 * turned, 0.0) + kept,
        layer=np.where(by_layer & ~keeps, 2 * software.wire[0] * shape.cut_layer(candidate.tensor), 0.0),
    )


def working(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    """Returns what the backward of one layer works with beside what is kept: its feed-forward, and scores.

    Feed-forward: the gradients of its inner arrays and their product, and, made again, those arrays; five arrays as
    wide as the stream. Attention whose scores are in memory: those, as the software has it, less what of them is kept.
    """
    found = software.cost(lambda own: (_working(shape, candidate, own),), candidate)[0]
    if not (far := exchanged.travels(candidate)).any():
        return found
    own = replace(software.pieces or software, worked=0.0, kept=(0.0, 0.0))
    return np.where(far, _working(shape, candidate, own) + exchanged.worked_bytes(shape, candidate, software), found)


def _working(shape: Shape, candidate: Candidate, software: SoftwareModel) -> Any:
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    hidden = 2 * tokens * shape.width / candidate.tensor
    projected = 2 * tokens * (2 * shape.dim + 2 * shape.kv_dim) / candidate.tensor
    full = np.isin(candidate.remat, ("full", "offload"))
    stream = 10 * tokens * shape.dim
    forward = full * ((1 + shape.gated) * hidden + projected) + (2 + shape.gated) * hidden + stream
    score = tokens * shape.heads * shape.seq / candidate.tensor
    rows, keys = candidate.microbatch, (shape.kv_heads or shape.heads) / candidate.tensor
    worked = software.worked * (1 + software.relaid * np.greater(rows, keys) / 4)
    # where matmuls' results are kept, those of attention are among them, but over pieces of sequences, whose shares in
    # 16 bits are also taken out of their stack before a matmul reads them
    there = np.where(np.equal(candidate.remat, "all_dots") & np.equal(candidate.context, 1), software.kept[1], 0.0)
    alone = np.equal(candidate.remat, "none") & (software.kept[1] > 0)
    there = np.where(alone & np.equal(candidate.pipe, 1), software.kept[0], there)
    # of a slot's scores a stage makes shares, their gradients and a mask again; where they are read in place, they too
    # are copied first. A backward that is split selects and transposes instead, about as much as is worked elsewhere
    again = RESTORED + SCORE * in_place(candidate, software)
    worked = np.where(alone & np.greater(candidate.pipe, 1) & ~candidate.split, again, worked)
    return forward + np.maximum(worked - there, 0.0) * score
