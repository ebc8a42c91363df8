"""Bytes of sharding besides the training state: gradients while they are made, and parameters gathered to compute with.

ZeRO's stages say what `fsdp` shards between steps; what a step makes ready, or has not scattered yet, comes on top. Of
a decoder that jaxpar itself trains `jaxpar.plan.model.own_program` counts it.
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe


def gathered_for_a_step(candidate: Candidate, recipe: Recipe) -> Any:
    """Returns whether all parameters are gathered once for a step, being shards between steps."""
    between = np.greater_equal(candidate.zero, recipe.since) & np.less(candidate.zero, 3)
    return between & np.greater(candidate.shards, 1)


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
    return np.where(scattered, held / candidate.shards, held) + beside


def gathered(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
    """Returns the bytes of parameters made ready to compute with: a layer and the next, or all that a stage has.

    All are gathered for a step where shards are what is kept of them between steps, but in stage 3.
    """
    for_a_step = gathered_for_a_step(candidate, recipe)
    of_stage = stage_parameters(shape, candidate, "last")
    pair = np.where(np.equal(candidate.zero, 3) & np.greater(candidate.fsdp, 1), shape.cut_layer(candidate.tensor), 0)
    return software.wire[0] * np.where(for_a_step, of_stage, 2 * pair)
