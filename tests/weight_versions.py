"""PipeDream's training without a flush, by definition: which weights a microbatch sees, and how long it takes.

    1f1b, 3 stages: of microbatch 2, stage 0 goes forward with weights that no backward has changed yet, its backward
    comes when two have. Without stashing that backward would differentiate another function than its forward computed.

A table is run as an endless one: microbatches are minibatches, and each stage updates its weights as soon as its
backward is done. Weights are numbered by the updates in them.

Source: Narayanan et al. (2019), arXiv:1806.03377.
"""

from collections.abc import Sequence
from typing import Literal, NamedTuple

from jaxpar.pipeline.tables.library import schedule
from jaxpar.pipeline.tables.schedule import Schedule

Keep = Literal["nothing", "stash", "vertical"]


class Versions(NamedTuple):
    """Updates in the weights that a part of the model used for one microbatch.

    Attributes:
      forward: Those its forward used.
      backward: Those its backward differentiated with.
      now: Those that were the newest when its backward ran; its gradient is now - backward updates late.
    """

    forward: int
    backward: int
    now: int


def pipedream(stages: int, minibatches: int) -> Schedule:
    """Returns the order of PipeDream, 1f1b with P - d minibatches in flight on stage d, for a run of `minibatches`."""
    return schedule("1f1b", stages=stages, microbatches=minibatches)


def versions(table: Schedule, keep: Keep) -> dict[tuple[int, int], Versions]:
    """Returns (part, microbatch) to the weights used; on one chunk per stage, part is the stage.

    Args:
      table: A schedule, run with an update after every backward (or every W, where backward is split).
      keep: nothing: forward and backward take the newest weights there are. stash: a backward takes those of its own
        forward. vertical: all parts take those that were the newest on part 0 when the microbatch came in; they have
        them, since an update reaches part 0 last.

    In the steady state of 1f1b, stage d of P: stash goes forward with weights P - 1 - d updates old, so that it keeps
    P - d versions; vertical with weights P - 1 updates old on all stages.
    """
    last = "W" if table.split else "B"
    updates, entered = [0] * table.parts, {}
    used: dict[tuple[int, int], int] = {}
    seen: dict[tuple[int, int], Versions] = {}
    for row in table.cells:
        cells = [(table.part(stage, cell.chunk), cell) for stage, cell in enumerate(row) if cell]
        for part, (op, microbatch, _) in cells:
            if op == "F":
                entered.setdefault(microbatch, updates[part])
                used[part, microbatch] = entered[microbatch] if keep == "vertical" else updates[part]
            elif op == "B":
                forward, now = used[part, microbatch], updates[part]
                seen[part, microbatch] = Versions(forward, now if keep == "nothing" else forward, now)
        for part, cell in cells:
            updates[part] += cell.op == last
    return seen


def steady(forward: Sequence[float], backward: Sequence[float]) -> float:
    """Returns the time of a minibatch in PipeDream's steady state: its slowest stage never waits.

    Args:
      forward: What each stage takes.
      backward: The same, whole.
    """
    return max(f + b for f, b in zip(forward, backward, strict=True))


def flushed(forward: Sequence[float], backward: Sequence[float], microbatches: int) -> float:
    """Returns the time of a microbatch in GPipe with a flush every `microbatches`: (M+P-1) / M of the slowest ticks.

    All stages go in lockstep: each of the M+P-1 forward ticks takes as long as the slowest stage's forward, whether
    that stage has work in it or not, and so for backward. `price` gives less where the slowest stages idle at first.

    Source: Huang et al. (2018), arXiv:1811.06965, for stages that differ.
    """
    return (microbatches + len(forward) - 1) / microbatches * (max(forward) + max(backward))
