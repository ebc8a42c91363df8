"""The bytes of a step of a traced model on one device, by cause; with a pipeline: `traced_stages.py`.

activations   live bytes at the fullest moment of the program, `model/liveness.py`; with microbatches, the batch of
              all of them twice: as it is given, and in their order
gradients     those that exist at that moment; with microbatches, also their sum
working       copies of parameters in 16 bits at that moment; where they are shards, those that are gathered: of ZeRO-3
              with recomputation for a pass, else for the step
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.memory import Memory, bytes_by_zero_stage
from jaxpar.plan.model.kernel_order import REDUCED, SCATTERED
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import ModelTrace
from jaxpar.plan.techniques.span import gathers_once, gradient_bytes
from jaxpar.plan.techniques.table import added_bytes
from jaxpar.plan.traced_shape import TracedShape
from jaxpar.plan.traced_stages import evaluate_by_kind, per_row, stages_memory


def traced_memory(shape: TracedShape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Memory:
    """Returns the bytes of a device, by cause."""
    return evaluate_by_kind(
        candidate,
        lambda unpipelined: _memory(shape, unpipelined, software, recipe),
        lambda staged: stages_memory(shape.stage_trace, staged, software, recipe),
    )


def _memory(shape: TracedShape, candidate: Candidate, software: SoftwareModel, recipe: Recipe) -> Memory:
    unsharded_parameters, shard = shape.shards.unsharded_amount(candidate), shape.shards.shard_amount(candidate)
    state = shape.other_state.unsharded_amount(candidate), shape.other_state.shard_amount(candidate)
    has_state = any(shape.other_state.by_sizes.values())
    extra_state = {"state": np.where(np.equal(candidate.zero, 0), *state)} if has_state else {}
    parameters, gradients, moments = bytes_by_zero_stage(unsharded_parameters, shard, candidate, recipe)
    zero3, accumulates = np.equal(candidate.zero, 3), np.greater(candidate.microbatches, 1)
    # shards are cast once, before the loop over microbatches
    cast = np.where(zero3 & accumulates, shard, 0.0)
    for_step = gathers_once(candidate, recipe) | software.keeps_gathered(candidate)
    # a loop over microbatches has all of them that it keeps, from its first collective on
    gathered = shape.itemsize * (np.where(for_step & accumulates, unsharded_parameters, 0.0) + cast)
    kept = np.where(for_step, np.where(accumulates, "", "step"), np.where(zero3, "pass", ""))
    summed = gradient_bytes(gradients, candidate, software, recipe, stacked=shape.stacked)
    # the share of the gradients, in the dtype in which they are computed: the update casts them. With microbatches, one
    # collective reduces a microbatch's gradients of all arrays that are no stacks
    share = summed / np.maximum(recipe.gradients * unsharded_parameters, 1.0)
    unreduced = np.greater(candidate.replicas, 1) * (1 - shape.stacked)
    peak = _peak(
        shape.trace, candidate, copies=np.equal(gathered, 0), gathered=kept,
        gradients=np.where(accumulates, unreduced, share), updated=parameters + moments,
    )  # fmt: skip
    return (
        Memory(
            parameters=parameters,
            gradients=peak["gradients"] + np.where(accumulates, summed, 0.0),
            optimizer=moments,
            activations=peak["activations"] + np.where(accumulates, _split_batch(shape.trace, candidate), 0.0),
            logits=0.0 * peak["activations"],
            working=peak["weights"] + gathered,
        )
        .plus(extra_state)
        .plus(added_bytes(shape, candidate, software, recipe))
    )


def _split_batch(trace: ModelTrace, candidate: Candidate) -> Any:
    """Returns the bytes of a device's batch of all microbatches, and of a copy that is reordered by microbatch."""
    batch = trace.programs["none"].batch
    rows = np.multiply(candidate.microbatch, candidate.microbatches)
    return 2 * sum(amount * np.power(np.asarray(rows, float), power) for power, amount in enumerate(batch))


def _peak(
    trace: ModelTrace, candidate: Candidate, *, copies: object, gathered: object, gradients: object, updated: object
) -> dict[str, Any]:
    """Returns the live bytes at the fullest moment of the loss and its gradients, by class.

    Args:
      trace: The programs.
      candidate: The layout.
      copies: Whether the program itself copies parameters (e.g. by a cast), rather than gathering them.
      gathered: How long a gathered array of parameters is kept, as in `Estimate.peak`.
      gradients: The share of the gradients that a device has.
      updated: Bytes that the update writes.
    """

    def fullest(
        rows: int,
        remat: str,
        context: int,
        tensor: int,
        copied: bool,
        kept: str,
        share: float,
        updated: float,
        combined: int,
    ) -> dict[str, float]:
        program = trace.program(remat, context, tensor)
        return program.peak(
            rows, weights=float(copied), gradients=share, gathered=kept, combined=combined, updated=updated
        )

    # gradients of replicas are scattered over fsdp, or all-reduced
    combined = np.where(np.greater(candidate.fsdp, 1), SCATTERED, np.where(candidate.replicas > 1, REDUCED, 0))
    split = candidate.context, candidate.tensor
    return per_row(
        fullest, candidate.microbatch, candidate.remat, *split, copies, gathered, gradients, updated, combined
    )
