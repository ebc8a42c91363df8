"""The seconds of one training step, by cause.

    step = span of the schedule's table x (1 + stragglers) + exposed sharding + optimizer

The last part has the head. Fields of a candidate may be arrays; every number here is then an array too. All seconds
are modelled, by formulas with the constants of the hardware and the software.
"""

from typing import Any

import numpy as np

from jaxpar.plan.candidate import Candidate
from jaxpar.plan.causes import Causes
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model import layer_time
from jaxpar.plan.model.layer_bytes import stage_parameters
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.techniques import pipe, span
from jaxpar.plan.techniques.base import Work
from jaxpar.plan.techniques.table import block_seconds, overlapped_seconds, step_seconds


class StepTime(Causes):
    """Seconds of a step on its busiest device, by cause.

    matmuls      matmuls with weights, forward and backward, including the head
    attention    attention between its projections
    elementwise  norms, activations, loss, gradient accumulation
    recompute    recomputation in the backward pass
    tensor, ...  exposed collectives of each of `techniques.table.TECHNIQUES`, including recomputed ones
    sharding     exposed collectives of fsdp, data and, for gradients, context
    bubble       waiting for other stages, according to the schedule's table
    send         time that messages between stages add, and the collectives of a spread embedding and head
    stragglers   waiting for the slowest device; grows with the number of devices
    host         exposed copies of layer inputs to host memory and back
    optimizer    the update, and the host's time per step
    """


def optimizer(
    parameters: np.ndarray | float,
    candidate: Candidate,
    hardware: Hardware,
    software: SoftwareModel,
    *,
    trained: float = 1.0,
) -> Any:
    """Returns the seconds of the update: memory traffic of the parameters that a device updates, and the host's time.

    Args:
      parameters: Parameters on a device.
      candidate: The layout.
      hardware: The machines.
      software: The program.
      trained: Share of the parameters that are updated.
    """
    traffic = (
        software.update * trained * parameters / np.where(np.greater(candidate.zero, 0), software.sharers(candidate), 1)
    )
    return hardware.stream(traffic) + software.host


def _host(shape: Shape, candidate: Candidate, hardware: Hardware, layer: tuple[Any, Any]) -> dict[str, Any]:
    if not np.any(np.equal(candidate.remat, "offload")):
        return {}
    return {"host": layer_time.host_wait_seconds(shape, candidate, hardware, layer)}


def step_time(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
    """Returns the seconds of a step, by cause."""
    forward, backward, recompute = layer_time.block(shape, candidate, hardware, software)
    head_f, head_b = layer_time.head(shape, candidate, hardware, software)
    collectives = block_seconds(shape, candidate, hardware, software)
    sends_f, sends_b = (sum(blocks) for blocks in zip(*collectives.values(), strict=True))
    layers = candidate.layers(shape.layers)

    # times of a part: its layers; trained weights have as many gradient matmuls as the inputs
    weights = layers * backward.matmuls * shape.trained / (1 + shape.trained)
    end_sends = pipe.spread_head_seconds(shape, candidate, hardware)
    times = (
        layers * (forward.total + sends_f),
        layers * (backward.total + recompute.total + sends_b) - weights,
        weights,
        head_f.total + end_sends[0],
        head_b.total + end_sends[1],
    )
    send = pipe.send(shape, candidate, hardware, software)
    table = span.counts(
        *np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks, send)[:4],
        run=software.run,
    )
    span_alone = span.span(table, (*times, 0.0))
    span_with_sends = span.span(table, (*times, send))

    count = candidate.microbatches * candidate.chunks * layers
    heads = candidate.microbatches
    busy = count / layers * sum(times[:3]) + heads * (times[3] + times[4])
    parameters = stage_parameters(shape, candidate, "last", spmd=software.spmd)
    step_collectives = step_seconds(shape, candidate, hardware, software)
    work = Work(parameters=parameters, layers=candidate.chunks * layers, compute=span_with_sends)
    return StepTime(
        matmuls=count * (forward.matmuls + backward.matmuls) + heads * (head_f.matmuls + head_b.matmuls),
        attention=count * (forward.core + forward.scores + backward.core + backward.scores),
        elementwise=count * (forward.elementwise + backward.elementwise)
        + heads * (head_f.elementwise + head_b.elementwise)
        + layer_time.collective_copies(parameters, candidate, hardware, software),
        recompute=count * recompute.total,
        **{cause: count * sum(exposed) + step_collectives[cause] for cause, exposed in collectives.items()},
        **overlapped_seconds(work, candidate, hardware, software),
        # not rounding errors
        bubble=np.where(np.equal(candidate.pipe, 1), 0.0, np.maximum(span_alone - busy, 0.0)),
        send=np.maximum(span_with_sends - span_alone, 0.0) + heads * sum(end_sends),
        stragglers=span_with_sends * hardware.straggler_share(candidate.devices),
        optimizer=optimizer(parameters, candidate, hardware, software, trained=shape.trained),
        **_host(shape, candidate, hardware, (forward.total + sends_f, backward.total + recompute.total + sends_b)),
    ).times(hardware.calibration)
