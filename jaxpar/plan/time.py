"""The seconds of one training step, by cause.

    step = span of the schedule's table x (1 + stragglers) + sharding that nothing hides + optimizer

The stage that ends last bears the head. All fields of a candidate may be arrays, and so is then every number here.
Everything is modelled: formulas of their modules, on the constants of the hardware and the software.
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
from jaxpar.plan.techniques.asked import around, of_blocks, of_step
from jaxpar.plan.techniques.base import Work


class StepTime(Causes):
    """Seconds of a step on its busiest device, by cause.

    matmuls      those with weights, forward and backward, the head's too
    attention    attention between its projections
    elementwise  norms, activations, loss, sums of gradients
    recompute    what the backward pass computes again
    tensor, ...  exposed collectives of each of `techniques.table.TECHNIQUES`, those that are repeated too
    sharding     exposed collectives of fsdp, data and, for gradients, context
    bubble       waiting for other stages, as the table has it
    send         what messages between stages add to that, those of ends that are spread too
    stragglers   waiting for the slowest device, whose kernels take longer than the mean: the more there are, the more
    host         inputs of layers on their way to host memory and back, as far as no layer's computation hides them
    optimizer    the update, and what the host takes around it
    """


def optimizer(
    held: Any, candidate: Candidate, hardware: Hardware, software: SoftwareModel, *, trained: float = 1.0
) -> Any:
    """Returns the seconds of the update: its bytes of memory, over the share of the `held` that a device updates.

    And those in which chips wait for the host once a step.

    Args:
      held: Parameters of a device.
      candidate: The layout.
      hardware: The machines.
      software: The program.
      trained: Share of the parameters that are updated.
    """
    moved = software.update * trained * held / np.where(np.greater(candidate.zero, 0), software.sharers(candidate), 1)
    return hardware.stream(moved) + software.host


def _host(shape: Shape, candidate: Candidate, hardware: Hardware, layer: tuple[Any, Any]) -> dict[str, Any]:
    """Returns the cause `host`, where some layout has inputs of layers in host memory."""
    if not np.any(np.equal(candidate.remat, "offload")):
        return {}
    return {"host": layer_time.on_host(shape, candidate, hardware, layer)}


def step_time(shape: Shape, candidate: Candidate, hardware: Hardware, software: SoftwareModel) -> StepTime:
    """Returns what a step takes, by cause."""
    forward, backward, again = layer_time.block(shape, candidate, hardware, software)
    head_f, head_b = layer_time.head(shape, candidate, hardware, software)
    shared = of_blocks(shape, candidate, hardware, software)
    ahead, back = (sum(each) for each in zip(*shared.values(), strict=True))
    deep = candidate.layers(shape.layers)

    # a part: its layers; gradients of weights that are trained are as many matmuls as those of the inputs
    weights = deep * backward.matmuls * shape.trained / (1 + shape.trained)
    spread = pipe.spread(shape, candidate, hardware)
    times = (
        deep * (forward.total + ahead),
        deep * (backward.total + again.total + back) - weights,
        weights,
        head_f.total + spread[0],
        head_b.total + spread[1],
    )
    send = pipe.send(shape, candidate, hardware, software)
    table = span.counts(
        *np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks, send)[:4],
        run=software.run,
    )
    still = span.span(table, (*times, 0.0))
    moving = span.span(table, (*times, send))

    count = candidate.microbatches * candidate.chunks * deep
    heads = candidate.microbatches
    busy = count / deep * sum(times[:3]) + heads * (times[3] + times[4])
    held = stage_parameters(shape, candidate, "last", everywhere=software.everywhere)
    more = of_step(shape, candidate, hardware, software)
    work = Work(parameters=held, layers=candidate.chunks * deep, compute=moving)
    return StepTime(
        matmuls=count * (forward.matmuls + backward.matmuls) + heads * (head_f.matmuls + head_b.matmuls),
        attention=count * (forward.core + forward.scores + backward.core + backward.scores),
        elementwise=count * (forward.elementwise + backward.elementwise)
        + heads * (head_f.elementwise + head_b.elementwise),
        recompute=count * again.total,
        **{cause: count * sum(both) + more[cause] for cause, both in shared.items()},
        **around(work, candidate, hardware, software),
        bubble=np.where(np.equal(candidate.pipe, 1), 0.0, np.maximum(still - busy, 0.0)),  # not what rounding leaves
        send=np.maximum(moving - still, 0.0) + heads * sum(spread),
        stragglers=moving * hardware.waits(candidate.devices),
        optimizer=optimizer(held, candidate, hardware, software, trained=shape.trained),
        **_host(shape, candidate, hardware, (forward.total + ahead, backward.total + again.total + back)),
    ).times(hardware.pace)
