"""The bytes a step needs on one device, by cause, on the first and on the last stage: the larger counts.

    static        parameters, gradients, optimizer state, each over tensor, and over fsdp as `zero` says
    activations   what a layer keeps for its backward, x layers of a part x (microbatch, chunk) pairs in flight
    logits        of the loss: gone before a layer's backward begins, so they count where they are more than that
    working       what the backward of one layer computes again, and the parameters gathered for it and the next

Of a layer, [tokens, dim] being 1 (Korthikanti et al. 2022, arXiv:2205.05198, equations 1 to 6, for any widths):

    stream        10: 2 norm inputs, the inputs of two products, 2 masks, or as the software keeps it; sharded with
                  sequence parallelism only
    inner         24 for q, k, v, attention's result, 2 or 3 times hidden; sharded by tensor
    scores        5 heads seq / dim: softmax, mask, product, or as the software keeps them; sharded by tensor; none in
                  a fused kernel
"""

from typing import Any, Literal

import numpy as np

from jaxpar.pipeline.tables.library import LIBRARY
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Causes
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR, Recipe


class Memory(Causes):
    """Bytes on the device that needs most, by cause; libraries, compiler's scratch and fragmentation come on top.

    parameters     of the model
    gradients      of one step
    optimizer      its state
    activations    kept for backward passes
    logits         kept for the loss
    working        computed or gathered for one layer at a time
    """

    @property
    def static(self) -> Any:
        """Bytes that are there between steps, and the gradients."""
        return self["parameters"] + self["gradients"] + self["optimizer"]


def stage_parameters(
    shape: Shape, candidate: Candidate, stage: Literal["first", "last"], *, everywhere: bool = False
) -> Any:
    """Returns the parameters on a device of a stage, before fsdp shards them.

    The tensor axis cuts matrices, and the biases of those it cuts by outputs; not norms, nor what is added to the
    stream. The first stage has the embedding; the last, the head, and the embedding where that is tied to it; or all
    stages have both, `everywhere`: whole, or their shares of the vocabulary where they are spread.
    """
    blocks = _blocks(shape, candidate)
    one = np.equal(candidate.pipe, 1) | everywhere
    table = shape.vocab * shape.dim / candidate.tensor / np.where(everywhere, candidate.sharing, 1)
    places = shape.learned * shape.seq * shape.dim
    norm = (1 + shape.biases) * shape.dim
    if stage == "first":
        return blocks + table + places + np.where(one, norm + (not shape.tied) * table, 0)
    return blocks + table + norm + np.where(one, (not shape.tied) * table + places, 0)


def _blocks(shape: Shape, candidate: Candidate) -> Any:
    """Returns the parameters of the layers on a device of a stage, before fsdp shards them."""
    return candidate.chunks * candidate.layers(shape.layers) * shape.cut_layer(candidate.tensor)


def static(
    shape: Shape, candidate: Candidate, recipe: Recipe, stage: Literal["first", "last"], *, everywhere: bool = False
) -> tuple[Any, Any, Any]:
    """Returns the bytes of parameters, gradients and optimizer state. Source: Rajbhandari et al., figure 1."""
    count = stage_parameters(shape, candidate, stage, everywhere=everywhere)
    return by_stage(count, count / candidate.fsdp, candidate, recipe)


def by_stage(whole: Any, shard: Any, candidate: Candidate, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Returns the bytes of parameters, gradients and optimizer state of so many parameters, whole or as fsdp's shard.

    Source: Rajbhandari et al., figure 1.
    """
    held = lambda zero: np.where(np.greater_equal(candidate.zero, zero), shard, whole)  # noqa: E731
    return recipe.parameters * held(recipe.since), recipe.gradients * held(2), recipe.optimizer * held(1)


def layer_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns what a layer keeps of one microbatch with the candidate's remat, and what its backward works with."""
    kept, working = software.cost(lambda own: _layer_bytes(shape, candidate, own), candidate)
    return kept, working


def _layer_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel) -> tuple[Any, Any]:
    """Returns the same, for layouts that all have the attention of one software model."""
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    tensor = candidate.tensor
    stream = tokens * shape.dim / np.where(candidate.sequence, tensor, 1)
    qkv = 2 * tokens * (shape.dim + 2 * shape.kv_dim) / tensor
    result = 2 * tokens * shape.dim / tensor
    hidden = 2 * tokens * shape.width / tensor
    score = tokens * shape.heads * shape.seq / tensor
    scores = software.kept[0] * score
    rows, keys = candidate.microbatch, (shape.kv_heads or shape.heads) / tensor
    kept_twice, worked_twice = (software.relaid * np.greater(*each) for each in ((rows * keys, 1), (rows, keys)))
    inner = qkv + result + (2 + shape.gated) * hidden
    others = 4 * tokens * shape.kv_dim / tensor * (candidate.context - 1)  # keys and values of the others' tokens
    everything = (software.residual + 2 * software.dropout) * stream + inner + others + scores
    working = everything + worked_twice / 4 * scores
    dots = 6 * stream + qkv + (1 + shape.gated) * hidden
    kept = {
        "none": everything,
        "all_dots": dots + result + np.equal(candidate.context, 1) * software.kept[1] * (1 + kept_twice) * score,
        "dots": dots,
        "selective": everything - scores,
        "op": 4 * stream + result + (qkv + (1 + shape.gated) * hidden) / 2,
        "full": 2 * stream,
    }
    remat = np.asarray(candidate.remat)
    return np.select([remat == name for name in kept], list(kept.values())), working


def in_flight(candidate: Candidate) -> tuple[Any, Any]:
    """Returns the most (microbatch, chunk) pairs that the first and the last stage keep at once.

    Source: `Kind.peak`, which tests hold to the replay of the table, `Schedule.peak`.
    """
    keys = np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks)
    found = {}
    for key in zip(*(array.ravel().tolist() for array in keys), strict=True):
        if key not in found:
            name, stages, count, chunks = key
            peak = LIBRARY[name].peak
            found[key] = [peak(stages, count, chunks, stage) for stage in (0, stages - 1)]
    pairs = np.array([found[key] for key in zip(*(array.ravel().tolist() for array in keys), strict=True)])
    return pairs[:, 0].reshape(keys[0].shape), pairs[:, 1].reshape(keys[0].shape)


def memory(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe = JAXPAR) -> Memory:
    """Returns what a device needs, of the first or the last stage, whichever is most in all."""
    kept, everything = layer_bytes(shape, candidate, software)
    deep = candidate.layers(shape.layers)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    ways = candidate.tensor * candidate.sharing
    logits = 4 * tokens * shape.vocab / ways  # float32, and the two inputs of norm and product
    logits = logits + 4 * tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    one = np.equal(candidate.pipe, 1)
    moments = []
    for stage, flying in zip(("first", "last"), in_flight(candidate), strict=True):
        parameters, gradients, optimizer = static(shape, candidate, recipe, stage, everywhere=software.everywhere)
        at_loss, again = np.where(one | (stage == "last"), logits, 0.0), everything - kept
        moments.append(
            Memory(
                parameters=parameters,
                gradients=_gradients(shape, candidate, software, recipe, gradients),
                optimizer=optimizer,
                activations=flying * deep * kept,
                logits=np.where(at_loss > again, at_loss, 0.0),
                working=np.where(at_loss > again, 0.0, again)
                + _gathered(shape, candidate, software, recipe)
                + _scattered(shape, candidate, software, recipe),
            )
        )
    return Memory.largest(moments)


def _gradients(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, held: Any) -> Any:
    """Returns the bytes of gradients while they are made, `held` being those of ZeRO's stage.

    Reduced for every microbatch: of one, stage 1 can scatter them at once; of several, each is beside their sum. One
    program on all stages reduces after its table: until then none is sharded but in stage 2, and the layers' of a tick,
    as products leave them, are beside their sum.
    """
    stacked = shape.layers * shape.layer_parameters / shape.parameters
    held = while_made(held, candidate, software, recipe, stacked=stacked)
    if software.everywhere:
        count = stage_parameters(shape, candidate, "last", everywhere=True)
        ways = np.where(np.equal(candidate.zero, 2), candidate.fsdp, 1)
        together = recipe.gradients * count / ways + software.wire[1] * _blocks(shape, candidate)
        held = np.where(np.equal(candidate.pipe, 1), held, together)
    return held


def _scattered(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
    """Returns the bytes of a chunk's gradients in the sum's dtype, which stage 2 scatters in every tick of a table."""
    each_tick = software.everywhere & np.greater(candidate.pipe, 1) & np.equal(candidate.zero, 2)
    sent = each_tick & np.greater(candidate.fsdp, 1)
    return np.where(sent, recipe.gradients * _blocks(shape, candidate) / candidate.chunks, 0.0)


def while_made(
    held: Any, candidate: Candidate, software: SoftwareModel, recipe: Recipe, *, stacked: float = 1.0
) -> Any:
    """Returns the bytes of gradients while they are made, where they are reduced for every microbatch.

    A scan over layers gives their gradients all at once, `stacked` of all parameters; others are added as they come.
    They have the dtype of what they are gradients of: of stored parameters, or of the copy that is gathered for a step.
    """
    if not software.eager:
        return held
    one, several = np.equal(candidate.pipe, 1), np.greater(candidate.microbatches, 1)
    scattered = one & ~several & np.equal(candidate.zero, 1)
    lighter = np.where(gathered_for_a_step(candidate, recipe), software.wire[1] / max(recipe.gradients, 1e-9), 1.0)
    beside = np.where(one & several, stacked * lighter * held, 0.0)
    return np.where(scattered, held / candidate.fsdp, held) + beside


def gathered_for_a_step(candidate: Candidate, recipe: Recipe) -> Any:
    """Returns whether all parameters are gathered once for a step, being shards between steps."""
    between = np.greater_equal(candidate.zero, recipe.since) & np.less(candidate.zero, 3)
    return between & np.greater(candidate.fsdp, 1)


def _gathered(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
    """Returns the bytes of parameters made ready to compute with: a layer and the next, or all that a stage has.

    All are gathered for a step where shards are what is kept of them between steps, but in stage 3. Where a stage has
    several chunks its layers are not neighbours: they are dealt out, a copy more.
    """
    for_a_step = gathered_for_a_step(candidate, recipe)
    of_stage = stage_parameters(shape, candidate, "last", everywhere=software.everywhere)
    pair = np.where(np.equal(candidate.zero, 3) & np.greater(candidate.fsdp, 1), shape.cut_layer(candidate.tensor), 0)
    layers = np.where(for_a_step, of_stage, 2 * pair)
    if software.everywhere:
        whole = stage_parameters(shape, candidate, "last", everywhere=True)
        dealt = _blocks(shape, candidate) * np.greater(candidate.chunks, 1)
        layers = np.where(np.equal(candidate.pipe, 1), layers, whole + dealt)
    return software.wire[0] * layers
