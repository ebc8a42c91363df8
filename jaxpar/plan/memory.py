"""The bytes a step needs on one device, by cause, on the first and on the last stage: the larger counts.

    static        parameters, gradients, optimizer state, each over tensor, and over fsdp as `zero` says
    activations   what a layer keeps for its backward, x layers of a part x (microbatch, chunk) pairs in flight; where a
                  table splits backwards, also what their first halves leave for the second
    logits        of the loss: gone before a layer's backward begins, so they count where they are more than that
    working       what the backward of one layer computes again, and the parameters gathered for it and the next

What a layer keeps is in `model/layer_bytes.py`; what a technique adds, in its file.
"""

from collections.abc import Iterator
from typing import Any, Literal

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Causes
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.layer_bytes import in_place, layer_bytes, spare_parameters, stage_parameters, stash_bytes
from jaxpar.plan.model.own_program import moments
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.model.state_bytes import JAXPAR, Recipe
from jaxpar.plan.techniques.asked import added_bytes
from jaxpar.plan.techniques.pipe import in_flight
from jaxpar.plan.techniques.sharding_bytes import while_made


class Memory(Causes):
    """Bytes on the device that needs most, by cause; libraries, compiler's scratch and fragmentation come on top.

    parameters     of the model
    gradients      of one step
    optimizer      its state
    activations    kept for backward passes
    logits         kept for the loss
    working        computed or gathered for one layer at a time
    ...            further causes of `techniques.table.TECHNIQUES`
    """

    @property
    def static(self) -> Any:
        """Bytes that are there between steps, and the gradients."""
        return self["parameters"] + self["gradients"] + self["optimizer"]


def static(
    shape: Shape, candidate: Candidate, recipe: Recipe, stage: Literal["first", "last"], *, everywhere: bool = False,
    sharers: Any = None,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Returns the bytes of parameters, gradients and optimizer state. Source: Rajbhandari et al., figure 1.

    They are shared by the devices of fsdp, or by so many `sharers`. Where all stages are one program (`everywhere`),
    they store equal parts of the layers, also of layers that they do not divide.
    """
    count = stage_parameters(shape, candidate, stage, everywhere=everywhere)
    count = count - (spare_parameters(shape, candidate) if everywhere else 0.0)
    return by_stage(count, count / (candidate.fsdp if sharers is None else sharers), candidate, recipe)


def by_stage(whole: Any, shard: Any, candidate: Candidate, recipe: Recipe) -> tuple[Any, Any, Any]:
    """Returns the bytes of parameters, gradients and optimizer state of so many parameters, whole or as fsdp's shard.

    Source: Rajbhandari et al., figure 1.
    """
    held = lambda zero: np.where(np.greater_equal(candidate.zero, zero), shard, whole)  # noqa: E731
    return recipe.parameters * held(recipe.since), recipe.gradients * held(2), recipe.optimizer * held(1)


def memory(shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe = JAXPAR) -> Memory:
    """Returns what a device needs, of the first or the last stage, whichever is most in all."""
    kept, everything = layer_bytes(shape, candidate, software)
    added = added_bytes(shape, candidate, software, recipe)
    if software.everywhere:
        every = _of_own_program(shape, candidate, software, recipe, kept)
    else:
        every = _of_stages(shape, candidate, software, recipe, kept, everything)
    return Memory.largest([each.plus(added) for each in every])


def _of_own_program(
    shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, kept: Any
) -> Iterator[Memory]:
    """Yields what every device has at the fullest moments of a step of jaxpar's own."""
    (flying, late), (_, last) = in_flight(candidate)
    late = np.maximum(late, last)
    state = {"everywhere": True, "sharers": software.sharers(candidate)}
    parameters, _, optimizer = static(shape, candidate, recipe, "last", **state)
    deep, table = candidate.layers(shape.layers), np.greater(candidate.pipe, 1)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    # one program's slots: an input from its arrival to its backward, and one gradient more
    message = table * 2 * tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    # XLA copies what a branch returns: one slot and one stash more than the table counts are there as ops end
    slots = flying + (table & ~in_place(candidate, software))
    stash = (late + np.greater(late, 0)) * stash_bytes(shape, candidate)
    activations = deep * (slots * kept + stash) + message * (flying + 1)
    for gradients, logits, working, there in moments(shape, candidate, software, recipe):
        yield Memory(
            parameters=parameters,
            gradients=gradients,
            optimizer=optimizer,
            activations=there * activations,
            logits=logits,
            working=working,
        )


def _of_stages(
    shape: Shape, candidate: Candidate, software: SoftwareModel, recipe: Recipe, kept: Any, everything: Any
) -> Iterator[Memory]:
    """Yields what devices of the first and of the last stage have, where each stage runs a program of its own."""
    deep = candidate.layers(shape.layers)
    tokens = 1.0 * candidate.microbatch * shape.seq / candidate.context
    ways = candidate.tensor * candidate.sharing
    logits = 4 * tokens * shape.vocab / ways  # float32, and the two inputs of norm and matmul
    logits = logits + 4 * tokens * shape.dim / np.where(candidate.sequence, candidate.tensor, 1)
    one, stash = np.equal(candidate.pipe, 1), stash_bytes(shape, candidate)
    for stage, (flying, late) in zip(("first", "last"), in_flight(candidate), strict=True):
        parameters, held, optimizer = static(shape, candidate, recipe, stage, sharers=software.sharers(candidate))
        at_loss, again = np.where(one | (stage == "last"), logits, 0.0), everything - kept
        yield Memory(
            parameters=parameters,
            gradients=while_made(held, candidate, software, recipe),
            optimizer=optimizer,
            activations=deep * (flying * kept + (late + np.greater(late, 0)) * stash),
            logits=np.where(at_loss > again, at_loss, 0.0),
            working=np.where(at_loss > again, 0.0, again),
        )
