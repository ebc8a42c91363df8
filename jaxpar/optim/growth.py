"""Batches that grow instead of a falling learning rate: phases, each a multiple of the batch before.

    step      0  1  2   3        4        5 6 7 8     grow = [[3, 2], [5, 2]]
    draws     0  1  2   3 4      5 6      7 8 9 10 ...
    batch     B  B  B   2 B      2 B      4 B

A batch of a later phase is several draws, each a batch of the first phase: no example is skipped or repeated, and data
sources need not know. A step runs more microbatches of the same size: memory stays as it is, and each phase compiles
one more program.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.errors import refuse


@dataclass(frozen=True)
class Growth:
    """Phases of a growing batch.

    Attributes:
      phases: (step, factor) pairs, steps rising: after so many steps the batch becomes factor times larger.

    Source: Smith, Kindermans, Ying, Le (2018), arXiv:1711.00489: dividing the rate by a factor, or multiplying the
    batch by it, gives updates the same temperature; see `noise`.
    """

    phases: tuple[tuple[int, int], ...] = ()

    @property
    def factors(self) -> tuple[int, ...]:
        """Draws per step of each phase, starting with the first phase's 1."""
        result = [1]
        for _, factor in self.phases:
            result.append(result[-1] * factor)
        return tuple(result)

    def factor(self, step: int) -> int:
        """Draws that a step, counted from 0, takes."""
        return self.factors[sum(begin <= step for begin, _ in self.phases)]

    def total_draws(self, steps: int) -> int:
        """Total draws of the first `steps` steps."""
        begins = [0, *(begin for begin, _ in self.phases)]
        ends = [*begins[1:], steps]
        return sum(
            factor * max(0, min(end, steps) - begin)
            for factor, begin, end in zip(self.factors, begins, ends, strict=True)
        )

    def draws(self, step: int) -> range:
        """The draws that a step, counted from 0, takes."""
        return range(self.total_draws(step), self.total_draws(step + 1))

    def describe(self, batch: int) -> str:
        """Describes the phases for a batch size; "" if it does not grow."""
        if not self.phases:
            return ""
        phases_and_factors = zip(self.phases, self.factors[1:], strict=True)
        later = ", ".join(f"{batch * factor} after {begin}" for (begin, _), factor in phases_and_factors)
        return f"{batch} examples per step, {later} steps: {len(set(self.factors))} programs"


def check_phases(phases: Sequence[tuple[int, float]], key: str, steps: int = 2**31) -> None:
    """Refuses phases that are not in order, or change nothing.

    Args:
      phases: (step, factor) pairs.
      key: Name of the setting, for messages.
      steps: Number of steps in the run.

    Raises:
      JaxparError: With the first phase that is wrong.
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
