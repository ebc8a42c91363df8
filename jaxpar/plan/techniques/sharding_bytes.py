"""Bytes of sharding besides the training state: gradients while they are made, and parameters gathered to compute with.

ZeRO's stages say what `fsdp` shards between steps; what a step makes ready, or has not scattered yet, comes on top.
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import block_parameters, in_place, stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe


def gathered_for_a_step(candidate: Candidate, recipe: Recipe) -> Any:
    """Returns whether all parameters are gathered once for a step, being shards between steps."""
    between = np.greater_equal(candidate.zero, recipe.since) & np.less(candidate.zero, 3)
    return between & np.greater(candidate.fsdp, 1)


def gradients(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, held: Any) -> Any:
    """Returns the bytes of gradients while they are made, `held` being those of ZeRO's stage.

    Reduced for every microbatch: of one, stage 1 can scatter them at once; of several, each is beside their sum. One
    program on all stages reduces after its table: until then none is sharded but in stage 2. A layer's, as matmuls
    leave it, is beside the sum that it is added to; where ticks mix ops, those of all layers are.
    """
    stacked = shape.layers * shape.layer_parameters / shape.parameters
    held = while_made(held, candidate, software, recipe, stacked=stacked)
    if software.everywhere:
        count = stage_parameters(shape, candidate, "last", everywhere=True)
        ways = np.where(np.equal(candidate.zero, 2), candidate.fsdp, 1)
        # in place a layer's, as its matmul leaves it and as it is added; else those of all layers
        one = (software.wire[1] + recipe.gradients) * shape.cut_layer(candidate.tensor)
        every = software.wire[1] * block_parameters(shape, candidate)
        together = recipe.gradients * count / ways + np.where(in_place(candidate, software), one, every)
        held = np.where(np.equal(candidate.pipe, 1), held, together)
    return held


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


def gathered(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
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
        dealt = block_parameters(shape, candidate) * np.greater(candidate.chunks, 1)
        layers = np.where(np.equal(candidate.pipe, 1), layers, whole + dealt)
    return software.wire[0] * layers


def scattered(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
    """Returns the bytes of a chunk's gradients in the sum's dtype, which stage 2 scatters where ticks mix ops."""
    each_tick = software.everywhere & np.greater(candidate.pipe, 1) & np.equal(candidate.zero, 2)
    sent = each_tick & np.greater(candidate.fsdp, 1) & ~in_place(candidate, software)
    return np.where(sent, recipe.gradients * block_parameters(shape, candidate) / candidate.chunks, 0.0)
