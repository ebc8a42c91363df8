"""Errors of predictions: expected from held-out errors of published runs, and corrected by one measured run.

    expected error     mean absolute error of the most similar runs
    interval           90 % quantile of their absolute errors
    apart              typical difference between errors of two runs of one group (the same machine and software)

Similar runs have the same chip, with or without a pipeline and a tensor axis, and about as many devices. Their errors
are in `without_system.csv`, written by `python -m tests.bench.planner --runs package --leave-out system --write FILE`,
and in `unseen_systems.csv`, written by `python -m tests.bench.planner --runs tests/bench/unseen_runs.csv --write FILE`:
runs of nine more systems, collected when the constants stood. A system is a training program, such as Megatron-LM, in
all versions and on all chips; none of the runs is of jaxpar. All runs are of decoders: none is published for others.

Calibration on one measured run multiplies all predicted seconds of a step by

    pace  =  (measured / predicted) ^ belief

A single run says little about its machine, because errors vary more between runs of one machine than between machines;
so `BELIEF`, the exponent, is below a half.
"""

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from itertools import combinations
from typing import Protocol

import numpy as np

from jaxpar.errors import refuse
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.search import Question, Ranked
from jaxpar.plan.time import step_time

NEAREST = 60  # most similar runs: fewer come from one or two systems, more are not similar
SHARE = 0.9  # share of the runs that an interval has to contain
# distances of two runs: another chip, only one with a pipeline, only one with a tensor axis, ten times the devices,
# another software
CHIP, PIPE, TENSOR, DECADE, STACK = 2.0, 1.0, 0.5, 1.0, 0.5
# share of the variance of logarithmic held-out errors that is between groups of runs: .18 if every run has equal weight
# (one-way analysis of variance), .48 if each of 16 groups has equal weight; this is about their geometric mean
BELIEF = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutRun:
    """A run and the error of its prediction, by constants fitted without the run's system.

    Attributes:
      system: The training program.
      group: Group of the run: one system, chip and version.
      stack: Its software, by the name in `tests.bench.published.stacks`.
      chip: Key of its chip.
      devices: Number of devices.
      pipe: Stages of its pipeline.
      tensor: Devices that share each matrix.
      error: Predicted / published seconds - 1.
    """

    system: str
    group: str
    stack: str
    chip: str
    devices: int
    pipe: int
    tensor: int
    error: float

    def distance(self, other: "HeldOutRun") -> float:
        """Returns the distance to another run; 0 if chip, software, kind of layout and devices are the same."""
        return (
            CHIP * (self.chip != other.chip)
            + STACK * (self.stack != other.stack)
            + PIPE * ((self.pipe > 1) != (other.pipe > 1))
            + TENSOR * ((self.tensor > 1) != (other.tensor > 1))
            + DECADE * min(2.0, abs(math.log10(self.devices / other.devices)))
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class ErrorEstimate:
    """The expected error of a prediction, as shares of the step time.

    Attributes:
      mean: Mean absolute error.
      interval: Half-width of the 90 % interval.
      resolution: Smallest difference at which two layouts of one model on one machine can be distinguished.
      runs: Number of published runs behind these numbers.
      stack: Whether some of them use the same software.
      chip: Whether some of them use the same chip.
    """

    mean: float
    interval: float
    resolution: float
    runs: int
    stack: bool
    chip: bool

    def __str__(self) -> str:
        absent = ["of this software"] * (not self.stack) + ["on this chip"] * (not self.chip)
        missing_note = f", none {' or '.join(absent)}" if absent else ""
        return (
            f"{self.mean:.0%} on average, nine of ten within {self.interval:.0%}, as {self.runs} runs of others "
            f"most like it{missing_note}; layouts within {self.resolution:.1%} are equal"
        )


@cache
def load_published(without: str = "system") -> tuple[HeldOutRun, ...]:
    """Loads the held-out errors of the published runs in the package.

    Args:
      without: The runs left out of the fit: of the same "system", or of the same "group".
    """
    text = files("jaxpar.plan.measurements").joinpath(f"without_{without}.csv").read_text(encoding="utf-8")
    return _parse(text)


@cache
def load_stated() -> tuple[HeldOutRun, ...]:
    """Loads the runs behind a stated error: all whose system no constant that predicts them was fitted on."""
    text = files("jaxpar.plan.measurements").joinpath("unseen_systems.csv").read_text(encoding="utf-8")
    return load_published("system") + _parse(text)


def _parse(text: str) -> tuple[HeldOutRun, ...]:
    return tuple(
        HeldOutRun(
            system=row["system"], group=row["group"], stack=row["stack"], chip=row["chip"], devices=int(row["devices"]),
            pipe=int(row["pipe"]), tensor=int(row["tensor"]), error=float(row["error"]),
        )
        for row in csv.DictReader(text.splitlines())
    )  # fmt: skip


def estimate(prediction: HeldOutRun, runs: Sequence[HeldOutRun]) -> ErrorEstimate:
    """Returns the expected error of a prediction.

    Args:
      prediction: The predicted run; its error, system and group are ignored.
      runs: Published runs.
    """
    nearest = sorted(runs, key=prediction.distance)[:NEAREST]
    errors = np.sort([abs(run.error) for run in nearest])
    count = len(errors)
    bound = errors[min(count - 1, math.ceil(SHARE * (count + 1)) - 1)]  # conformal prediction's quantile
    pairs = [abs(math.log1p(a.error) - math.log1p(b.error)) for a, b in combinations(nearest, 2) if a.group == b.group]
    return ErrorEstimate(
        mean=float(errors.mean()),
        interval=float(bound),
        resolution=float(np.median(pairs)) if pairs else float(errors.mean()),
        runs=count,
        stack=any(run.stack == prediction.stack for run in nearest),
        chip=any(run.chip == prediction.chip for run in nearest),
    )


def expected_error(question: Question, ranked: Ranked) -> str:
    """Returns the expected error of a layout's step time as text."""
    expected = estimate_for(question, ranked)
    if question.model.has_published_runs:
        return str(expected)
    return f"not known: all published runs are of decoders; layouts within {expected.resolution:.1%} count as equal"


def estimate_for(question: Question, ranked: Ranked) -> ErrorEstimate:
    """Returns the expected error of a layout's step time; no run of jaxpar is published."""
    layout = ranked.candidate
    run = HeldOutRun(
        system="", group="", stack="JAXPAR", chip=question.hardware.chip.key, devices=question.devices,
        pipe=layout.pipe, tensor=layout.tensor, error=0.0,
    )  # fmt: skip
    return estimate(run, load_stated())


def coverage(runs: Sequence[HeldOutRun]) -> float:
    """Returns the share of runs whose error is within the interval from the runs of other systems."""
    hits = [abs(a.error) <= estimate(a, [b for b in runs if b.system != a.system]).interval for a in runs]
    return sum(hits) / len(hits)


class MeasuredRun(Protocol):
    """A timed run, such as `tests.bench.published.read.Run`."""

    @property
    def name(self) -> str:
        """Description of the run."""
        ...

    @property
    def source(self) -> str:
        """Source of the seconds."""
        ...

    @property
    def seconds(self) -> float:
        """Measured seconds of a step."""
        ...

    @property
    def shape(self) -> Shape:
        """The model."""
        ...

    @property
    def candidate(self) -> Candidate:
        """The layout."""
        ...

    @property
    def hardware(self) -> Hardware:
        """The machine before calibration."""
        ...

    @property
    def software(self) -> SoftwareModel:
        """The software model of the training program."""
        ...


def calibrate(run: MeasuredRun, *, belief: float = BELIEF) -> Hardware:
    """Returns the machine of a run with the pace calibrated on it, and the run in its `source`.

    Args:
      run: One layout, with its measured seconds of a step.
      belief: Share of the difference that the machine takes: with 1 the prediction equals the run, with 0 the machine
        stays unchanged.

    Raises:
      JaxparError: If the seconds are not positive and finite, or the belief is not within 0 to 1.
    """
    if not 0 < run.seconds < float("inf") or not 0 <= belief <= 1:
        raise refuse(
            f"{run.name} in {run.seconds} s a step, believed by {belief}",
            rule="a step takes seconds above 0, and belief is 0 to 1",
            fix="calibrate(run)",
        )
    machine = run.hardware
    expected = float(step_time(run.shape, run.candidate, machine, run.software).total)
    pace = machine.calibration * (run.seconds / expected) ** belief
    note = f"times multiplied by {pace:.3f}, fitted on {run.name}, {run.seconds:.4g} s a step: {run.source}"
    return replace(machine, calibration=pace, source=f"{note}; {machine.source}")
