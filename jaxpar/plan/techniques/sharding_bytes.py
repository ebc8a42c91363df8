"""Bytes of sharding during a step, besides the training state: unreduced gradients and gathered parameters.

For a decoder in jaxpar's own program see `jaxpar.plan.model.peak_moments`.
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import Recipe


def gathers_once(candidate: Candidate, recipe: Recipe) -> Any:
    """Returns whether all parameters are shards between steps, and are gathered once per step."""
    sharded_parameters = np.greater_equal(candidate.zero, recipe.sharded_from) & np.less(candidate.zero, 3)
    return sharded_parameters & np.greater(candidate.shards, 1)


def gradient_bytes(
    gradients: Any, candidate: Candidate, software: SoftwareModel, recipe: Recipe, *, stacked: float = 1.0
) -> Any:
    """Returns the bytes of gradients and of their sum in the backward pass, if each microbatch reduces them.

    A scan over layers returns their gradients all at once, for the share `stacked` of all parameters; other gradients
    are added one by one. Their dtype is that of the stored parameters, or of the copy that is gathered for a step.
    """
    if not software.reduce_every_microbatch:
        return gradients
    unpipelined, several = np.equal(candidate.pipe, 1), np.greater(candidate.microbatches, 1)
    scattered = unpipelined & ~several & np.equal(candidate.zero, 1)
    dtype_ratio = np.where(gathers_once(candidate, recipe), software.wire[1] / max(recipe.gradients, 1e-9), 1.0)
    extra = np.where(unpipelined & several, stacked * dtype_ratio * gradients, 0.0)
    return np.where(scattered, gradients / candidate.shards, gradients) + extra


def gathered_bytes(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Any:
    """Returns the bytes of gathered parameters: a layer and the next, or all parameters of a stage.

    All are gathered for a step if they are shards between steps, except with ZeRO-3.
    """
    for_a_step = gathers_once(candidate, recipe)
    of_stage = stage_parameters(shape, candidate, "last")
    layer = np.where(
        np.equal(candidate.zero, 3) & np.greater(candidate.fsdp, 1), shape.device_layer_parameters(candidate.tensor), 0
    )
    return software.wire[0] * np.where(for_a_step, of_stage, 2 * layer)
