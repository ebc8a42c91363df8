"""The seconds of a step of a traced model, by cause; with a pipeline: `traced_stages.py`.

matmuls       2 FLOP per multiplication of every matmul and convolution of the loss and its gradients; parameters
              that are not trained have no gradient
elementwise   bytes that the other kernels read and write, `model/fusion.py`; each array's sum over microbatches,
              and copies around its collectives over fsdp
recompute     the kernels of the program under the remat policy beyond those without it
optimizer     its state, parameters and gradients read and written, and the kernels of each array
"""

from dataclasses import replace
from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import SMALLEST_KERNEL, Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.state_bytes import Recipe
from jaxpar.plan.model.tracing import ModelTrace
from jaxpar.plan.techniques.base import Work
from jaxpar.plan.techniques.table import overlapped_seconds, step_seconds
from jaxpar.plan.time import StepTime, optimizer
from jaxpar.plan.traced_shape import TracedShape
from jaxpar.plan.traced_stages import evaluate_by_kind, per_row, stages_time

COPIES = 2  # kernels for each array around its gather and its scatter, as XLA 0.12 compiles them for H100s


def traced_time(
    shape: TracedShape, candidate: Candidate, hardware: Hardware, software: SoftwareModel, recipe: Recipe
) -> StepTime:
    """Returns the seconds of a step, by cause."""
    update = _update_bytes(shape, recipe)
    return evaluate_by_kind(
        candidate,
        lambda unpipelined: _time(shape, unpipelined, hardware, replace(software, update=update)),
        lambda staged: stages_time(shape.stage_trace, staged, hardware, software, update=update),
    )


def _update_bytes(shape: TracedShape, recipe: Recipe) -> float:
    """Returns the bytes per parameter of the update: state read and written, gradients read by norm and update."""
    written = shape.trace.programs["none"].gradient_bytes / shape.parameters
    trained = recipe.gradients / recipe.parameters
    return 2 * (trained * recipe.parameters + recipe.optimizer + written)


def _time(shape: TracedShape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
    count = candidate.microbatches
    plain = _kernels(shape.trace, replace(candidate, remat="none"), hardware)
    kernels = _kernels(shape.trace, candidate, hardware)
    recompute = np.maximum(sum(kernels.values()) - sum(plain.values()), 0.0)
    # remat may even save time: writing stacked residuals can cost more than recomputing them
    plain["elementwise"] = plain["elementwise"] + np.minimum(sum(kernels.values()) - sum(plain.values()), 0.0)
    parameters = shape.shards.unsharded_amount(candidate)
    accumulation = np.where(
        np.greater(count, 1),
        _array_seconds(shape, software.accumulate, candidate, hardware, layers=False),
        0.0,
    )
    copies = np.where(
        np.greater(candidate.fsdp, 1),
        COPIES * _array_seconds(shape, 2 * shape.itemsize, candidate, hardware, layers=True),
        0.0,
    )
    compute = count * (sum(plain.values()) + recompute + accumulation) + copies
    zeros = 0.0 * compute
    work = Work(parameters=parameters, layers=shape.trace.blocks, compute=compute)
    return StepTime(
        matmuls=count * plain["matmuls"],
        attention=zeros,
        elementwise=count * (plain["elementwise"] + accumulation) + copies,
        recompute=count * recompute,
        **{cause: zeros + exposed for cause, exposed in step_seconds(shape, candidate, hardware, software).items()},
        **overlapped_seconds(work, _summing(shape, candidate), hardware, software),
        bubble=zeros,
        send=zeros,
        stragglers=compute * hardware.straggler_share(candidate.devices),
        optimizer=optimizer(parameters, candidate, hardware, software)
        + SMALLEST_KERNEL * shape.trace.programs["none"].update_kernels,
    ).times(hardware.calibration)


def _summing(shape: TracedShape, candidate: Candidate) -> Candidate:
    """Returns the layout with the devices of a found `context` counted to `tensor`: its traffic has its own sums of
    gradients, and the strides stay.
    """
    if "context" in shape.named_axes:
        return candidate
    return replace(candidate, context=1, tensor=np.multiply(candidate.context, candidate.tensor))


def _kernels(trace: ModelTrace, candidate: Candidate, hardware: Hardware) -> dict[str, Any]:
    """Returns the seconds of a microbatch's matmuls and other kernels."""

    def seconds(rows: int, remat: str, context: int, tensor: int, casts: bool) -> dict[str, float]:
        return trace.program(remat, context, tensor).seconds(rows, hardware, casts=casts)

    # with shards or several microbatches, a step casts its shards once
    casts = np.equal(candidate.fsdp, 1) & np.equal(candidate.microbatches, 1)
    return per_row(seconds, candidate.microbatch, candidate.remat, candidate.context, candidate.tensor, casts)


def _array_seconds(shape: TracedShape, width: float, candidate: Candidate, hardware: Hardware, *, layers: bool) -> Any:
    """Returns the seconds of a kernel of `width` bytes per entry for each array, or for each layer of a stack."""
    share = shape.shards.unsharded_amount(candidate) / shape.parameters
    return sum(
        (count if layers else 1)
        * np.maximum(SMALLEST_KERNEL, hardware.stream(width * share * (size if layers else count * size)))
        for count, size in shape.arrays
    )
