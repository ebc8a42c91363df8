"""Runs stages one after another within some minutes; the next call goes on where this one stopped.

    has been measured by this code on this device      skipped
    does not fit into what is left                     not started; the next one that fits is
    ends with an error, or outlasts its limit          said in a line; the next one is started

Stages that failed come last when they are tried again, and a second failure is the last.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..gpu.lines import Lines
from ..gpu.process import Ended
from ..gpu.stage import Stage

WHOLE = "the stage"  # what the line about a stage itself is about
TRIES = 2
FAILED = ("crashed", "stopped at its limit")
Outcome = Literal[
    "measured", "there already", "no time left", "out of time", "crashed", "stopped at its limit", "given up"
]


@dataclass(frozen=True)
class Budget:
    """Seconds that may be spent, by a clock.

    Attributes:
      seconds: All of them.
      clock: Returns seconds, such as `time.monotonic`.
      began: What it returned at the beginning.
    """

    seconds: float
    clock: Callable[[], float]
    began: float

    @property
    def left(self) -> float:
        """Seconds that are left."""
        return self.seconds - (self.clock() - self.began)


def run(
    stages: Sequence[Stage], lines: Lines, budget: Budget, start: Callable[[Stage, float], Ended]
) -> dict[str, Outcome]:
    """Runs the stages, and returns how each ended.

    Args:
      stages: In order of what is wanted most.
      lines: The record.
      budget: What time there is.
      start: Runs a stage to its end or to a limit in seconds.

    Raises:
      JaxparError: If a line cannot be written: then nothing more is measured.
    """
    found: dict[str, Outcome] = {}
    for stage in sorted(stages, key=lambda stage: _failures(lines, stage)):
        found[stage.name] = _run(stage, lines, budget, start)
        print(f"{stage.name:<12}{found[stage.name]}; {max(budget.left, 0):.0f} s left", flush=True)
    return found


def _run(stage: Stage, lines: Lines, budget: Budget, start: Callable[[Stage, float], Ended]) -> Outcome:
    before = lines.find(stage.name, WHOLE)
    if before and before["outcome"] == "measured":
        return "there already"
    if _failures(lines, stage) >= TRIES:
        return "given up"
    if budget.left < stage.seconds:
        return "no time left"
    print(f"{stage.name:<12}{stage.measures}; beside {stage.beside}", flush=True)
    limit = min(stage.limit, budget.left)
    ended = start(stage, limit)
    outcome: Outcome = "crashed" if ended.status else "measured"
    if ended.status is None:  # only its own limit is its own fault
        outcome = "stopped at its limit" if limit == stage.limit else "out of time"
    failed = {} if outcome == "measured" else {"status": ended.status, "said": ended.said}
    lines.add(stage=stage.name, what=WHOLE, outcome=outcome, took_seconds=round(ended.seconds, 3), **failed)
    return outcome


def _failures(lines: Lines, stage: Stage) -> int:
    about = [line for line in lines.own() if (line.get("stage"), line.get("what")) == (stage.name, WHOLE)]
    return sum(line["outcome"] in FAILED for line in about)
