"""Prices a table, given the times of its ops: run freely, and run tick by tick.

asynchronous   a stage starts its next op as soon as its inputs are there: many programs that send to each other
barrier        a tick lasts as long as its slowest op, and all wait for its messages: one program on all devices

A table of ops that cost the same has the same price both ways; with unequal ones, a tick that mixes forwards and
backwards makes the forwards wait. Run freely, messages travel beside the computation, and nobody waits to be rid of
one. The price of the barrier is an upper one: a device waits for its neighbours on the ring, not for all, which comes
to the same for forwards and whole backwards, and to less where ticks mix three ops (zb_h1: .888 for .857 of the time
at work, with 4 stages, 32 microbatches, F = 1, B = 1.14, W = .86).
"""

from dataclasses import dataclass
from math import inf

from jaxpar.errors import JaxparError, Problem
from jaxpar.pipeline.tables.schedule import Schedule

Time = float | tuple[float, ...]


@dataclass(frozen=True)
class Times:
    """The time of each op, in any one unit.

    A number is a stage's whole share of the model, of which each chunk costs 1/chunks; a tuple has one entry for every
    part of the model.

    Attributes:
      forward: F.
      backward: The input-gradient half of a backward.
      weights: The weight-gradient half. Where backward is not split, a B costs both.
      send: A message between two stages.
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
    """The price of a schedule, in the unit of its `Times`.

    Attributes:
      asynchronous: From the first op to the end of the last, run freely.
      barrier: The same, run tick by tick.
      work: The time for which each stage computes.
      computed: The time for which all stages compute, with what an executor computes in idle cells: of a phased table
        all of them, as its ticks have no conditional; of another none.
      starts: (tick, stage) of the table to (start, end) of that cell, run freely.
      ticks: When each tick begins, run tick by tick, and when the last one ends.
    """

    asynchronous: float
    barrier: float
    work: tuple[float, ...]
    computed: float
    starts: dict[tuple[int, int], tuple[float, float]]
    ticks: tuple[float, ...]

    @property
    def asynchronous_bubble(self) -> float:
        """Share of the time in which a stage does not compute, run freely."""
        return self._idle(self.asynchronous)

    @property
    def barrier_bubble(self) -> float:
        """The same, run tick by tick."""
        return self._idle(self.barrier)

    @property
    def repeated(self) -> float:
        """What is computed, as a multiple of the work: where devices share one processor, time goes with it."""
        return self.computed / sum(self.work) if any(self.work) else 1.0

    def _idle(self, span: float) -> float:
        return 1 - sum(self.work) / len(self.work) / span if span else 0.0


def price(schedule: Schedule, times: Times) -> Price:
    """Returns the price of a schedule.

    Raises:
      JaxparError: If a tuple of times does not have one entry for every part.
    """
    cost = _costs(schedule, times)
    work, free = [0.0] * schedule.stages, [0.0] * schedule.stages
    there: dict[tuple[str, int, int], float] = {}  # (op, microbatch, part) to when its result is where it is needed
    starts, ticks, computed = {}, [0.0], 0.0
    for tick, row in enumerate(schedule.cells):
        slowest = message = 0.0
        for stage, cell in enumerate(row):
            if cell is None:
                continue
            part = schedule.part(stage, cell.chunk)
            on = {"F": 1, "B": -1, "W": 0}[cell.op]  # forwards go to the next part, backwards to the one before
            start = max(free[stage], there.get((cell.op, cell.microbatch, part - on), 0.0))
            end = start + cost[cell.op][part]
            away = 0 <= part + on < schedule.parts and schedule.place(part + on)[0] != stage
            there[cell.op, cell.microbatch, part] = end + times.send * away
            starts[tick, stage], free[stage] = (start, end), end
            work[stage] += cost[cell.op][part]
            slowest, message = max(slowest, cost[cell.op][part]), max(message, times.send * away)
        ticks.append(ticks[-1] + slowest + message)
        computed += slowest * schedule.stages
    computed = computed if schedule.phased else sum(work)
    return Price(max(free), ticks[-1], tuple(work), computed, starts, tuple(ticks))


def _costs(schedule: Schedule, times: Times) -> dict[str, tuple[float, ...]]:
    """Returns the time of every op of every part."""
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
