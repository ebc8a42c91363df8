"""The seconds of one training step, by cause.

    step = span of the schedule's table + sharding that nothing hides + optimizer

The stage that ends last bears the head. All fields of a candidate may be arrays, and so is then every number here.
Everything is modelled: formulas of their modules, on the constants of the hardware and the practice.
"""

from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from jaxpar.plan import bubble, traffic
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import Practice
from jaxpar.plan.memory import stage_parameters
from jaxpar.plan.model import layer_time
from jaxpar.plan.model.shape import Shape


@dataclass(frozen=True, kw_only=True, slots=True)
class StepTime:
    """Seconds of a step on its busiest device, by cause.

    Attributes:
      products: Products with weights, forward and backward, the head's too.
      attention: Attention between its projections.
      passes: Elementwise passes, norms, loss, sums of gradients.
      recompute: What the backward pass computes again.
      tensor: Exposed collectives of the tensor axis, those that are repeated too.
      context: Exposed collectives of the context axis for attention, those that are repeated too.
      sharding: Exposed collectives of fsdp, data and, for gradients, context.
      bubble: Waiting for other stages, as the table has it.
      send: What messages between stages add to that, those of ends that are spread too.
      optimizer: The update.
    """

    products: Any
    attention: Any
    passes: Any
    recompute: Any
    tensor: Any
    context: Any
    sharding: Any
    bubble: Any
    send: Any
    optimizer: Any

    @property
    def total(self) -> Any:
        """Seconds of the step."""
        return sum(getattr(self, field.name) for field in fields(self))


def optimizer(held: Any, candidate: Candidate, hardware: Hardware, practice: Practice) -> Any:
    """Returns the seconds of the update: its bytes of memory, over the share of the `held` that a device updates."""
    return hardware.stream(practice.update * held / np.where(np.greater(candidate.zero, 0), candidate.fsdp, 1))


def step_time(shape: Shape, candidate: Candidate, hardware: Hardware, practice: Practice) -> StepTime:
    """Returns what a step takes, by cause."""
    forward, backward, again = layer_time.block(shape, candidate, hardware, practice)
    head_f, head_b = layer_time.head(shape, candidate, hardware, practice)
    ahead, back = traffic.tensor(shape, candidate, hardware, practice)
    here, there = traffic.context(shape, candidate, hardware, practice)
    deep = candidate.layers(shape.layers)
    repeated = candidate.recomputed[4] * ahead

    # a part: its layers; weights' gradients are half of the products going backward and all sums of gradients
    weights = deep * backward.products / 2
    spread = traffic.spread(shape, candidate, hardware)
    times = (
        deep * (forward.total + ahead + here),
        deep * (backward.total + again.total + back + repeated + there) - weights,
        weights,
        head_f.total + spread[0],
        head_b.total + spread[1],
    )
    send = traffic.send(shape, candidate, hardware, practice)
    table = bubble.counts(
        *np.broadcast_arrays(candidate.schedule, candidate.pipe, candidate.microbatches, candidate.chunks, send)[:4],
        run=practice.run,
    )
    still = bubble.span(table, (*times, 0.0))
    moving = bubble.span(table, (*times, send))

    count = candidate.microbatches * candidate.chunks * deep
    heads = candidate.microbatches
    busy = count / deep * sum(times[:3]) + heads * (times[3] + times[4])
    held = stage_parameters(shape, candidate, "last", everywhere=practice.everywhere)
    traveling = sharding(held, candidate, hardware, practice, layers=candidate.chunks * deep, compute=moving)
    return StepTime(
        products=count * (forward.products + backward.products) + heads * (head_f.products + head_b.products),
        attention=count * (forward.core + forward.scores + backward.core + backward.scores),
        passes=count * (forward.passes + backward.passes) + heads * (head_f.passes + head_b.passes),
        recompute=count * again.total,
        tensor=count * (ahead + back + repeated),
        context=count * (here + there),
        sharding=traveling,
        bubble=np.where(np.equal(candidate.pipe, 1), 0.0, np.maximum(still - busy, 0.0)),  # not what rounding leaves
        send=np.maximum(moving - still, 0.0) + heads * sum(spread),
        optimizer=optimizer(held, candidate, hardware, practice),
    )


def sharding(
    held: Any, candidate: Candidate, hardware: Hardware, practice: Practice, *, layers: Any, compute: Any
) -> Any:
    """Returns the exposed seconds of fsdp's and data's collectives for `held` parameters of a device, of `layers`.

    `compute` seconds, those of waiting for other stages and their messages too, may hide the practice's share of them.

    What comes once a step runs beside the last microbatch's backward, two thirds of it; what comes for every
    microbatch, beside the rest.
    """
    shards = traffic.gradients(held, candidate, hardware, practice, layers=layers)
    copies = traffic.replicas(held, candidate, hardware, practice, layers=layers)
    each, once = (one + other for one, other in zip(shards, copies, strict=True))
    last = compute / candidate.microbatches * 2 / 3
    return traffic.exposed(each * candidate.microbatches, compute - last, practice.overlap) + traffic.exposed(
        once, last, practice.overlap
    )
