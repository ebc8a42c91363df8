"""Grows the batch in phases, instead of decreasing the learning rate.

    step      0  1  2   3        4        5 6 7 8     grow = [[3, 2], [5, 2]]
    draws     0  1  2   3 4      5 6      7 8 9 10 ...
    batch     B  B  B   2 B      2 B      4 B

A batch of a later phase consists of several draws; each draw is a batch of the size of the first phase. So no example
is skipped or repeated, and data sources do not depend on the phase. A step runs more microbatches of the same size: it
needs no more memory, and each phase compiles one more program.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.errors import refuse


@dataclass(frozen=True)
class Growth:
    """Phases of a growing batch.

    Attributes:
      phases: Pairs (step, factor), in order of steps: after `step` steps the batch becomes `factor` times larger.

    Source: Smith, Kindermans, Ying, Le (2018), arXiv:1711.00489: dividing the rate by a factor, or multiplying the
    batch by it, gives updates the same temperature; see `noise`.
    """

    phases: tuple[tuple[int, int], ...] = ()

    @property
    def factors(self) -> tuple[int, ...]:
        """Number of draws per step, for each phase; 1 for the first phase."""
        result = [1]
        for _, factor in self.phases:
            result.append(result[-1] * factor)
        return tuple(result)

    def factor(self, step: int) -> int:
        """Number of draws in a step, which is counted from 0."""
        return self.factors[sum(begin <= step for begin, _ in self.phases)]

    def total_draws(self, steps: int) -> int:
        """Total number of draws in the first `steps` steps."""
        begins = [0, *(begin for begin, _ in self.phases)]
        ends = [*begins[1:], steps]
        return sum(
            factor * max(0, min(end, steps) - begin)
            for factor, begin, end in zip(self.factors, begins, ends, strict=True)
        )

    def draws(self, step: int) -> range:
        """Range of the numbers of the draws in a step; steps are counted from 0."""
        return range(self.total_draws(step), self.total_draws(step + 1))

    def describe(self, batch: int) -> str:
        """Describes the phases for a batch size; "" if it does not grow."""
        if not self.phases:
            return ""
        phases_and_factors = zip(self.phases, self.factors[1:], strict=True)
        later = ", ".join(f"{batch * factor} after {begin}" for (begin, _), factor in phases_and_factors)
        return f"{batch} examples per step, {later} steps: {len(set(self.factors))} programs"


def check_phases(phases: Sequence[tuple[int, float]], key: str, steps: int = 2**31) -> None:
    """Refuses phases that are not in order or have no effect.

    Args:
      phases: (step, factor) pairs.
      key: Name of the setting, for messages.
      steps: Number of steps in the run.

    Raises:
      JaxparError: If a phase is invalid; the message names the first.
    """
    before = 0
    for begin, factor in phases:
        got = f"{key} = {[list(phase) for phase in phases]}"
        if not before < begin < steps:
            raise refuse(
                f"{got}: a phase begins after {begin} steps",
                rule=f"phases begin one after the other, here after step {before}, and before the run ends",
                fix=f"[{min(before + 1, steps - 1)}, {factor}]",
            )
        if not 1 < factor < 2**31:
            raise refuse(f"{got}: a factor of {factor}", rule="each phase has a factor above 1", fix=f"[{begin}, 2]")
        before = begin
