"""The bytes of a step on one device, by cause: the larger of the first and the last stage.

    static        parameters, gradients, optimizer state, divided by tensor, and by fsdp according to `zero`
    activations   residuals of a layer x layers of a part x (microbatch, chunk) pairs in flight; and the stash between
                  the two halves of a split backward
    logits        of the loss: freed before a layer's backward begins, so they count only if they exceed `working`
    working       recomputed activations of one layer's backward, and parameters gathered for it and the next layer

Residuals of a layer are in `model/layer_bytes.py`; bytes that a technique adds are in its file.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Causes
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import (
    head_shards,
    layer_bytes,
    spare_parameters,
    stage_parameters,
    stash_bytes,
    updates_in_place,
)
from jaxpar.plan.model.peak_moments import moments
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR, Recipe
from jaxpar.plan.techniques.pipe import in_flight
from jaxpar.plan.techniques.span import gradient_bytes
from jaxpar.plan.techniques.table import added_bytes


class Memory(Causes):
    """Bytes on the fullest device, by cause, without libraries, the compiler's scratch and fragmentation.

    parameters     of the model
    gradients      of one step
    optimizer      optimizer state
    activations    saved for backward passes
    logits         saved for the loss
    working        computed or gathered for one layer at a time
    ...            further causes of `techniques.table.TECHNIQUES`
    """

    @property
    def static(self) -> Any:
        """Bytes of parameters, gradients and optimizer state."""
        return self["parameters"] + self["gradients"] + self["optimizer"]


def static(
    shape: Shape, candidate: Candidate, recipe: Recipe, stage: Literal["first", "last"], *, spmd: bool = False,
    sharers: np.ndarray | float | None = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Returns the bytes of parameters, gradients and optimizer state. Source: Rajbhandari et al., figure 1.

    The devices of fsdp, or this many `sharers`, share them. If all stages run one program (`spmd`), each stores an
    equal part of the layers, even if the stages do not divide them.
    """
    count = stage_parameters(shape, candidate, stage, spmd=spmd)
    count = count - (spare_parameters(shape, candidate) if spmd else 0.0)
    return bytes_by_zero_stage(count, count / (candidate.fsdp if sharers is None else sharers), candidate, recipe)


def bytes_by_zero_stage(
    unsharded: np.ndarray | float, shard: np.ndarray | float, candidate: Candidate, recipe: Recipe
) -> tuple[Any, Any, Any]:
    """Returns the bytes of parameters, gradients and optimizer state by ZeRO stage (Rajbhandari et al., figure 1).

    Args:
      unsharded: Parameters on a device before fsdp shards them.
      shard: Parameters of fsdp's shard.
      candidate: Has the ZeRO stage.
      recipe: Bytes per parameter.
    """
    amount = lambda zero: np.where(np.greater_equal(candidate.zero, zero), shard, unsharded)  # noqa: E731
    return recipe.parameters * amount(recipe.sharded_from), recipe.gradients * amount(2), recipe.optimizer * amount(1)


def memory(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe = JAXPAR) -> Memory:
    """Returns the bytes of the fullest device, by cause: on the first or the last stage, whichever needs more."""
    residuals, all_residuals = layer_bytes(shape, candidate, software)
    extra = added_bytes(shape, candidate, software, recipe)
    if software.spmd:
        stages = _spmd_program(shape, candidate, software, recipe, residuals)
    else:
        stages = _program_per_stage(shape, candidate, software, recipe, residuals, all_residuals)
    totals = [stage.plus(extra) for stage in stages]
    fullest = np.argmax(np.stack(np.broadcast_arrays(*[stage.total for stage in totals])), axis=0)
    return Memory(**{cause: np.choose(fullest, [stage[cause] for stage in totals]) for cause in totals[0]})


def _spmd_program(
    shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, residuals: np.ndarray | float
) -> Iterator[Memory]:
    """Yields the bytes of a device at the fullest moments of a step of jaxpar's own program."""
    (in_use, stashed), (_, stashed_last) = in_flight(candidate)
    stashed = np.maximum(stashed, stashed_last)
    state = {"spmd": True, "sharers": software.sharers(candidate)}
    parameters, _, optimizer = static(shape, candidate, recipe, "last", **state)
    layers, table = candidate.layers(shape.layers), np.greater(candidate.pipe, 1)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    # slots of a pipeline: an input from its arrival to its backward, and one gradient
    message = table * 2 * tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    # XLA copies the results of a branch: at the end of an op one slot and one stash exist beyond the table's count
    slots = in_use + (table & ~updates_in_place(candidate, software))
    stash = (stashed + np.greater(stashed, 0)) * stash_bytes(shape, candidate)
    activations = layers * (slots * residuals + stash) + message * (in_use + 1)
    at_loss, *later = moments(shape, candidate, software, recipe)
    for gradients, logits, working, present in (at_loss, *later):
        yield Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=present * activations,
            logits=logits,
            working=working,
        )


def _program_per_stage(
    shape: Shape,
    candidate: Candidate,
    software: SoftwareModel,
    recipe: Recipe,
    residuals: np.ndarray | float,
    everything: np.ndarray | float,
) -> Iterator[Memory]:
    """Yields the bytes of the first and of the last stage, if each stage runs its own program."""
    layers = candidate.layers(shape.layers)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    vocab_shards = candidate.tensor * head_shards(candidate)
    logits = 4 * tokens * shape.vocab / vocab_shards  # float32, and the two inputs of norm and matmul
    logits = logits + 4 * tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    unpipelined, stash = np.equal(candidate.pipe, 1), stash_bytes(shape, candidate)
    for stage, (in_use, stashed) in zip(("first", "last"), in_flight(candidate), strict=True):
        parameters, summed, optimizer = static(shape, candidate, recipe, stage, sharers=software.sharers(candidate))
        at_loss, recomputed = np.where(unpipelined | (stage == "last"), logits, 0.0), everything - residuals
        yield Memory(
            parameters=parameters,
            gradients=gradient_bytes(summed, candidate, software, recipe),
            optimizer=optimizer,
            activations=layers * (in_use * residuals + (stashed + np.greater(stashed, 0)) * stash),
            logits=np.where(at_loss > recomputed, at_loss, 0.0),
            working=np.where(at_loss > recomputed, 0.0, recomputed),
        )
