"""Predicts the costs of a schedule with unequal stages: how long devices wait, and the bytes that each device holds.

    seconds of pieces ──► of each op of each part ──► a tick lasts as long as its slowest device ──► share of waiting
    bytes of pieces   ──► for each kind of memory, the maximum over stages                       ──► bytes per device

Nothing is compiled. All devices run one program, so each allocates, for every kind of memory, the maximum over stages.
Not counted: temporary arrays of a branch, the batch, the optimizer's state, and state such as BatchNorm's averages.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate

import jax
import jax.numpy as jnp

from jaxpar.jaxprs.dataflow import shapes
from jaxpar.jaxprs.part_programs import PartProgram
from jaxpar.partition.chain import Chain
from jaxpar.pipeline.run.edges import tree_bytes
from jaxpar.pipeline.run.stage import Keep
from jaxpar.pipeline.tables.price import OpTimes, price
from jaxpar.pipeline.tables.schedule import Schedule
from jaxpar.units import show_bytes

Messages = Mapping[tuple[int, int], tuple[float, float]]


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """Predicted costs of a schedule.

    The bytes count the buffers that the loop over ticks carries. XLA's temporary memory is larger: it also holds the
    temporary arrays of the largest branch, and gaps between arrays.

    Attributes:
      schedule: Name of the table.
      waiting: Share of the devices' time in which they wait for a slower device of the tick, or have no op.
      parameters: Bytes of parameters per device; the next three are per device, too.
      gradients: Bytes of the accumulated gradients.
      inbox: Bytes of the messages that wait to be read.
      residuals: Bytes of the residuals that are saved for the backward passes.
    """

    schedule: str
    waiting: float
    parameters: float
    gradients: float
    inbox: float
    residuals: float = 0.0

    @property
    def bytes(self) -> float:
        """Bytes per device, of all kinds."""
        return self.parameters + self.gradients + self.inbox + self.residuals

    def __str__(self) -> str:
        kinds = {"parameters": self.parameters, "gradients": self.gradients, "messages": self.inbox}
        kinds |= {"residuals": self.residuals} if self.residuals else {}
        *others, last = [f"{show_bytes(size)} of {kind}" for kind, size in kinds.items()]
        return (
            f"devices wait {self.waiting:.0%} of the time in {self.schedule}, and each holds {', '.join(others)} and "
            f"{last} (predicted)"
        )


def op_times(forwards: Sequence[float], stages: Sequence[int], *, split: bool, keep: Keep) -> OpTimes:
    """Returns the time of each op of each part for a microbatch, in the unit of `forwards`.

    B (gradients of a piece's inputs) takes as long as its forward, and so does W (gradients of its parameters). The
    first piece has no B. The last part has no forward op: its backward computes the loss. With `keep="inputs"`, B and
    W each recompute the forward first.

    Args:
      forwards: Time of the forward of each piece.
      stages: Number of pieces of each part.
      split: Whether the backward is split into B and W.
      keep: What a forward leaves for its backward.
    """
    forward, backward, weights = [], [], []
    ends = list(accumulate(stages))
    for part, (end, count) in enumerate(zip(ends, stages, strict=True)):
        total, first, is_last = sum(forwards[end - count : end]), forwards[end - count], part == len(stages) - 1
        again = total if keep == "inputs" or is_last else 0.0
        # gradients of the pieces' inputs: of those inside of the part, and of the part's own input
        inner, outer = total - first, first if part else 0.0
        forward.append(0.0 if is_last else total)
        if split:
            backward.append(again + inner + outer if part else 0.0)
            weights.append(again + inner + total)
        else:
            backward.append(again + inner + outer)
            weights.append(total)
    return OpTimes(tuple(forward), tuple(backward), tuple(weights))


def waiting_share(schedule: Schedule, times: OpTimes) -> float:
    """Returns the share of the time of all devices in which they wait.

    Args:
      schedule: The table.
      times: Time of each op of each part for a microbatch, as tuples.
    """
    counts = _counts(schedule)
    runs = [schedule.group / counts[schedule.locate(part)[0]] for part in range(schedule.parts)]

    def group_times(op: float | tuple[float, ...]) -> tuple[float, ...]:
        part_times = op if isinstance(op, tuple) else (op,) * schedule.parts
        return tuple(time * number for time, number in zip(part_times, runs, strict=True))

    tick_times = replace(
        times,
        forward=group_times(times.forward),
        backward=group_times(times.backward),
        weights=group_times(times.weights),
    )
    prices = price(schedule, tick_times)
    work = sum(count * busy for count, busy in zip(counts, prices.work, strict=True))
    return 1 - work / (sum(counts) * prices.barrier) if prices.barrier else 0.0


def inbox_bytes(schedule: Schedule, messages: Messages) -> float:
    """Returns the most bytes of messages that wait at once, on the stage with the most.

    Args:
      schedule: The table.
      messages: Maps (source part, target part) to a message's bytes of values and of gradients, per microbatch.
    """
    totals = [0.0] * schedule.stages
    for (source, target), (values, gradients) in messages.items():
        for size, op, sender, reader in ((values, "F", source, target), (gradients, "B", target, source)):
            totals[schedule.locate(reader)[0]] += size * _places(schedule, op, sender, reader)
    return max(totals)


def pool_bytes(schedule: Schedule, residuals: Mapping[int, float]) -> float:
    """Returns the most bytes of residuals that are saved at once, on the stage with the most.

    Args:
      schedule: The table.
      residuals: Maps each part to the bytes that its forward saves for its backward, per microbatch.
    """
    totals = [0.0] * schedule.stages
    for part, size in residuals.items():
        totals[schedule.locate(part)[0]] += size * _places(schedule, "F", part, part)
    return max(totals)


def costs_of_chain(chain: Chain, stages: Sequence[int], schedule: Schedule, forward: float) -> StageCosts:
    """Predicts the costs of a chain that is cut into stages. Stages save only their inputs, and recompute the rest.

    Gradients are float32, and as large as the parameters.

    Args:
      chain: The pieces of the model; the bytes that cross a cut are one message from the part before it to the next.
      stages: Number of pieces of each part.
      schedule: The table.
      forward: Share of the chain's seconds that forwards take.
    """
    ends = [*accumulate(stages)]
    times = op_times([forward * s for s in chain.seconds], stages, split=schedule.split, keep="inputs")
    messages = {
        (part, part + 1): (chain.crossing[end - 1], chain.crossing[end - 1]) for part, end in enumerate(ends[:-1])
    }
    parameters = [0.0] * schedule.stages
    for part, (end, count) in enumerate(zip(ends, stages, strict=True)):
        parameters[schedule.locate(part)[0]] += sum(chain.parameters[end - count : end])
    return StageCosts(
        schedule=schedule.name, waiting=waiting_share(schedule, times), parameters=max(parameters),
        gradients=max(parameters), inbox=inbox_bytes(schedule, messages),
    )  # fmt: skip


def costs_of_parts(
    parts: Sequence[PartProgram],
    params: Sequence[jax.ShapeDtypeStruct],
    schedule: Schedule,
    times: OpTimes,
    residuals: Mapping[int, float],
) -> StageCosts:
    """Predicts the costs of a cut whose parts are traced programs.

    Args:
      parts: The parts.
      params: Shapes of the parameters, in the order of the parts' indices.
      schedule: The table.
      times: Time of each op of each part for a microbatch.
      residuals: As for `pool_bytes`.
    """
    of_stage: list[set[int]] = [set() for _ in range(schedule.stages)]
    messages = {}
    for target, part in enumerate(parts):
        of_stage[schedule.locate(target)[0]].update(part.params)
        for source, variables in part.receives.items():
            sent = shapes(variables)
            moving = [leaf for leaf in sent if jnp.issubdtype(leaf.dtype, jnp.inexact)]
            messages[source, target] = tree_bytes(sent), tree_bytes(moving)
    wide = [jax.ShapeDtypeStruct(leaf.shape, jnp.promote_types(leaf.dtype, jnp.float32)) for leaf in params]
    return StageCosts(
        schedule=schedule.name,
        waiting=waiting_share(schedule, times),
        parameters=max(tree_bytes([params[i] for i in stage]) for stage in of_stage),
        gradients=max(tree_bytes([wide[i] for i in stage]) for stage in of_stage),
        inbox=inbox_bytes(schedule, messages),
        residuals=pool_bytes(schedule, residuals),
    )


def _counts(schedule: Schedule) -> tuple[int, ...]:
    return schedule.replicas or (1,) * schedule.stages


def _places(schedule: Schedule, op: str, sender: int, reader: int) -> int:
    """Returns the most results of an op that a device of part `reader`, which reads them last, stores at a time."""
    last = "W" if schedule.split else "B"
    begin, end = {}, {}
    for tick, stage, cell in schedule:
        part = schedule.part(stage, cell.chunk)
        if (cell.op, part) == (op, sender):
            begin[cell.microbatch] = tick
        if (cell.op, part) == (last, reader):
            end[cell.microbatch] = tick
    most = max(sum(begin[i] <= tick < end[i] for i in begin) for tick in range(schedule.ticks))
    return most * schedule.group // _counts(schedule)[schedule.locate(reader)[0]]
