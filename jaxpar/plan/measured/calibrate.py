"""A machine as one run of it showed it: calibrated hardware is a value that says what it was fitted on.

    pace  =  (measured / predicted) ^ belief

All seconds of a step are multiplied with the pace. Machines and software differ from what is predicted by less than
single runs do from others of their group, so that a run is believed by less than half: `BELIEF` of its difference.
"""

from dataclasses import replace
from typing import Protocol

from jaxpar.errors import refuse
from jaxpar.plan.candidate import Candidate
from jaxpar.plan.machine.hardware import Hardware
from jaxpar.plan.machine.software import SoftwareModel
from jaxpar.plan.model.shape import Shape
from jaxpar.plan.time import step_time

# the variance of groups over that and the variance inside of groups, of logarithms of held-out errors, the first less
# what scatter makes of it: .18 where every run counts alike (one-way analysis of variance), .48 where every one of 16
# groups does; in the middle, as a ratio
BELIEF = 0.3


class Measured(Protocol):
    """A run that somebody timed, such as `tests.bench.published.read.Run`."""

    @property
    def name(self) -> str:
        """What ran, in words."""
        ...

    @property
    def source(self) -> str:
        """Where its seconds come from."""
        ...

    @property
    def seconds(self) -> float:
        """Of a step, measured."""
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
        """The machine, as it was known before."""
        ...

    @property
    def software(self) -> SoftwareModel:
        """What ran on it."""
        ...


def calibrate(run: Measured, *, belief: float = BELIEF) -> Hardware:
    """Returns the machine of a run at the pace that the run showed.

    Args:
      run: One layout, with its seconds of a step.
      belief: How much of the difference is the machine's: 1 meets the run, 0 leaves all as it was.

    Raises:
      JaxparError: If the seconds are none, or the belief is not within 0 to 1.
    """
    if not 0 < run.seconds < float("inf") or not 0 <= belief <= 1:
        raise refuse(
            f"{run.name} in {run.seconds} s a step, believed by {belief}",
            rule="a step takes seconds above 0, and belief is 0 to 1",
            fix="calibrate(run)",
        )
    before = run.hardware
    expected = float(step_time(run.shape, run.candidate, before, run.software).total)
    pace = before.pace * (run.seconds / expected) ** belief
    note = f"pace {pace:.3f} fitted on {run.name}, {run.seconds:.4g} s a step: {run.source}"
    return replace(before, pace=pace, source=f"{note}; {before.source}")
