"""Calibrates a machine on one measured run.

    pace  =  (measured / predicted) ^ belief

All predicted seconds of a step are multiplied by the pace. A single run says little about its machine, because errors
vary more between runs of one machine than between machines; so `BELIEF`, the exponent, is below a half.
"""

from dataclasses import replace
from typing import Protocol

from jaxpar.errors import refuse
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.time import step_time

# share of the variance of logarithmic held-out errors that is between groups of runs: .18 if every run has equal weight
# (one-way analysis of variance), .48 if each of 16 groups has equal weight; this is about their geometric mean
BELIEF = 0.3


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
