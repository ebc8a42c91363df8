"""How far off a prediction is: what those of published runs say whose constants never saw the system of the run.

    expected error     mean of the errors' sizes, of the runs that are most like it
    interval           what nine in ten of those stay below
    apart              how far errors of two runs of one group differ, whose machine and software are the same

Alike are runs on the same chip, with or without a pipeline and a tensor axis, on about as many devices. Their errors
are in `without_system.csv`, written by `python -m tests.bench.planner --runs package --leave-out system --write FILE`.
A system is a training program, such as Megatron-LM, in all its versions and on all chips: jaxpar, for which a plan
is made, is none of them. All are tuned runs of decoders; nothing is published of other models.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from itertools import combinations

import numpy as np

from jaxpar.plan.search import Question, Ranked

NEAREST = 60  # runs that a prediction is compared with: fewer are of one or two systems, more are not like it
SHARE = 0.9  # of the runs that an interval has to hold
# how unlike two runs are: another chip, one of them with a pipeline, with a tensor axis, ten times the devices
CHIP, PIPE, TENSOR, DECADE, STACK = 2.0, 1.0, 0.5, 1.0, 0.5


@dataclass(frozen=True, kw_only=True, slots=True)
class Residual:
    """The error of a prediction by constants that never saw the run's system.

    Attributes:
      system: The program that made the run.
      group: Of the run: one system, chip and version.
      stack: Its software, by the name in `tests.bench.published.stacks`.
      chip: Key of its chip.
      devices: How many.
      pipe: Stages of its pipeline.
      tensor: Devices that share each matrix.
      error: Predicted over published seconds, less 1.
    """

    system: str
    group: str
    stack: str
    chip: str
    devices: int
    pipe: int
    tensor: int
    error: float

    def unlike(self, other: "Residual") -> float:
        """Returns how unlike another run it is; 0 where all that counts is the same."""
        return (
            CHIP * (self.chip != other.chip)
            + STACK * (self.stack != other.stack)
            + PIPE * ((self.pipe > 1) != (other.pipe > 1))
            + TENSOR * ((self.tensor > 1) != (other.tensor > 1))
            + DECADE * min(2.0, abs(math.log10(self.devices / other.devices)))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Trust:
    """How far a prediction is expected to be off; shares of the seconds of a step.

    Attributes:
      mean: On average.
      most: In nine of ten runs at most.
      apart: By how much two layouts of one model on one machine have to differ to be told apart.
      runs: Published runs that this rests on.
      stack: Whether runs of the same software are among them.
      chip: Whether runs on the same chip are among them.
    """

    mean: float
    most: float
    apart: float
    runs: int
    stack: bool
    chip: bool

    def __str__(self) -> str:
        missing = ["of this software"] * (not self.stack) + ["on this chip"] * (not self.chip)
        none = f", none {' or '.join(missing)}" if missing else ""
        return (
            f"{self.mean:.0%} on average, nine of ten within {self.most:.0%}, as {self.runs} tuned runs of others most "
            f"like it{none}; layouts within {self.apart:.1%} are equal"
        )


@cache
def published(without: str = "system") -> tuple[Residual, ...]:
    """Returns the errors of the published runs that the package knows.

    Args:
      without: By constants that never saw a run's "system", or its "group" alone.
    """
    text = files("jaxpar.plan.measured").joinpath(f"without_{without}.csv").read_text(encoding="utf-8")
    return tuple(
        Residual(
            system=row["system"], group=row["group"], stack=row["stack"], chip=row["chip"], devices=int(row["devices"]),
            pipe=int(row["pipe"]), tensor=int(row["tensor"]), error=float(row["error"]),
        )
        for row in csv.DictReader(text.splitlines())
    )  # fmt: skip


def trust(asked: Residual, known: Sequence[Residual]) -> Trust:
    """Returns how far a prediction is expected to be off.

    Args:
      asked: What is predicted; its error, its system and its group do not count.
      known: Published runs.
    """
    near = sorted(known, key=asked.unlike)[:NEAREST]
    size = np.sort([abs(each.error) for each in near])
    count = len(size)
    most = size[min(count - 1, math.ceil(SHARE * (count + 1)) - 1)]  # as conformal prediction counts, for few runs
    pairs = [abs(math.log1p(a.error) - math.log1p(b.error)) for a, b in combinations(near, 2) if a.group == b.group]
    return Trust(
        mean=float(size.mean()), most=float(most), apart=float(np.median(pairs)) if pairs else float(size.mean()),
        runs=count, stack=any(each.stack == asked.stack for each in near),
        chip=any(each.chip == asked.chip for each in near),
    )  # fmt: skip


def expected_error(question: Question, ranked: Ranked) -> str:
    """Returns the expected error of a layout's step time as text, or that none is known."""
    known = trusted(question, ranked)
    if question.model.published:
        return str(known)
    return f"not known: all published runs are of decoders; layouts within {known.apart:.1%} are taken for equal"


def trusted(question: Question, ranked: Ranked) -> Trust:
    """Returns how far the seconds of a layout are expected to be off; no run of jaxpar's own is published."""
    layout = ranked.candidate
    asked = Residual(
        system="", group="", stack="JAXPAR", chip=question.hardware.chip.key, devices=question.devices,
        pipe=layout.pipe, tensor=layout.tensor, error=0.0,
    )  # fmt: skip
    return trust(asked, published())


def held(known: Sequence[Residual]) -> float:
    """Returns the share of runs whose error is within the interval that the runs of other systems give it."""
    inside = [
        abs(each.error) <= trust(each, [other for other in known if other.system != each.system]).most for each in known
    ]
    return sum(inside) / len(inside)
