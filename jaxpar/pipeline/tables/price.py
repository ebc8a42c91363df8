"""Computes the time of a step from a table and the times of its ops, with and without a barrier after every tick.

asynchronous   a stage starts its next op as soon as its inputs have arrived: one program per stage
barrier        a tick lasts as long as its slowest op and its messages: one program on all devices

If all ops take the same time, both times are equal; otherwise, in a tick that mixes forwards and backwards, the
forwards wait. In an asynchronous run, messages overlap with computation, and no sender waits. The time with barriers is
an upper bound, because a device really waits only for its neighbours on the ring. This makes no difference for forwards
and whole backwards, but it does if ticks mix three ops (zb_h1: busy .888 of the time, not .857, with 4 stages,
32 microbatches, F = 1, B = 1.14, W = .86).
"""

from dataclasses import dataclass
from math import inf

from jaxpar.errors import JaxparError, Problem
from jaxpar.pipeline.tables.schedule import Schedule

Time = float | tuple[float, ...]


@dataclass(frozen=True)
class OpTimes:
    """The time of each op, in any common unit.

    A number is the time of one stage's layers, and a chunk takes 1/chunks of it; a tuple has one time per part of the
    model.

    Attributes:
      forward: Time of a forward.
      backward: Time of the input-gradient half of a backward.
      weights: Time of the weight-gradient half. If backward is not split, a B takes the sum of both.
      send: Time of a message between two stages.
    """

    forward: Time = 1.0
    backward: Time = 1.0
    weights: Time = 1.0
    send: float = 0.0

    def __post_init__(self):
        problems = []
        for key, time in vars(self).items():
            numbers = time if isinstance(time, tuple) and key != "send" else (time,)
            if not all(isinstance(n, int | float) and 0 <= n < inf for n in numbers):
                problems.append(Problem(f"{key}={time!r}", "a time is a finite number, not below 0", f"{key}=1.0"))
        if problems:
            raise JaxparError(*problems)


@dataclass(frozen=True)
class Price:
    """The time of a step with a schedule, in the unit of its `OpTimes`.

    Attributes:
      asynchronous: Time from the start of the first op to the end of the last in an asynchronous run.
      barrier: The same in a run with barriers.
      work: Time for which each stage computes.
      compute_time: Total time for which all stages compute. In a phased table this includes idle cells, because its
        ticks have no conditional, and so the executor computes in idle cells too.
      starts: (tick, stage) to (start, end) of that cell in the asynchronous run.
      ticks: The time at which each tick begins, with barriers, and at which the last one ends.
    """

    asynchronous: float
    barrier: float
    work: tuple[float, ...]
    compute_time: float
    starts: dict[tuple[int, int], tuple[float, float]]
    ticks: tuple[float, ...]

    @property
    def asynchronous_bubble(self) -> float:
        """Share of the time for which stages idle in an asynchronous run."""
        return self._idle(self.asynchronous)

    @property
    def barrier_bubble(self) -> float:
        """Share of the time for which stages idle in a run with barriers."""
        return self._idle(self.barrier)

    @property
    def work_ratio(self) -> float:
        """`compute_time` / total work; on simulated devices, which share a processor, time is proportional to it."""
        return self.compute_time / sum(self.work) if any(self.work) else 1.0

    def _idle(self, span: float) -> float:
        return 1 - sum(self.work) / len(self.work) / span if span else 0.0


def price(schedule: Schedule, times: OpTimes) -> Price:
    """Computes the time of a step with a schedule, asynchronously and with barriers.

    Raises:
      JaxparError: If a tuple of times does not have one entry for every part.
    """
    cost = _op_costs(schedule, times)
    work, free = [0.0] * schedule.stages, [0.0] * schedule.stages
    arrival: dict[tuple[str, int, int], float] = {}  # (op, microbatch, part) to the arrival time of its result
    starts, ticks, compute = {}, [0.0], 0.0
    for tick, row in enumerate(schedule.cells):
        slowest = message = 0.0
        for stage, cell in enumerate(row):
            if cell is None:
                continue
            part = schedule.part(stage, cell.chunk)
            direction = {"F": 1, "B": -1, "W": 0}[cell.op]  # forwards go to the next part, backwards to the one before
            start = max(free[stage], arrival.get((cell.op, cell.microbatch, part - direction), 0.0))
            end = start + cost[cell.op][part]
            sends = 0 <= part + direction < schedule.parts and schedule.locate(part + direction)[0] != stage
            arrival[cell.op, cell.microbatch, part] = end + times.send * sends
            starts[tick, stage], free[stage] = (start, end), end
            work[stage] += cost[cell.op][part]
            slowest, message = max(slowest, cost[cell.op][part]), max(message, times.send * sends)
        ticks.append(ticks[-1] + slowest + message)
        compute += slowest * schedule.stages
    compute = compute if schedule.phased else sum(work)
    return Price(max(free), ticks[-1], tuple(work), compute, starts, tuple(ticks))


def _op_costs(schedule: Schedule, times: OpTimes) -> dict[str, tuple[float, ...]]:
    """Returns the time of each op on each part."""
    parts, problems = {}, []
    for key in ("forward", "backward", "weights"):
        time = getattr(times, key)
        if isinstance(time, tuple) and len(time) != schedule.parts:
            problems.append(
                Problem(
                    f"{len(time)} times for {key}, for the {schedule.parts} parts of {schedule.name}",
                    "a tuple has one time for every part of the model: stages x chunks",
                    f"{key}=1.0, the same on all",
                )
            )
        parts[key] = time if isinstance(time, tuple) else (time / schedule.chunks,) * schedule.parts
    if problems:
        raise JaxparError(*problems)
    backward = parts["backward"]
    if not schedule.split:
        backward = tuple(b + w for b, w in zip(backward, parts["weights"], strict=True))
    return {"F": parts["forward"], "B": backward, "W": parts["weights"]}
