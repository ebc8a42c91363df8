"""Batches that grow where a rate would fall: phases of a run, each so many times the batch before.

    step      0  1  2   3        4        5 6 7 8     grow = [[3, 2], [5, 2]]
    draws     0  1  2   3 4      5 6      7 8 9 10 ...
    batch     B  B  B   2 B      2 B      4 B

A batch of a later phase is so many draws, each a batch of the first phase: no example is left out, none comes twice,
and a source knows nothing of it. Its microbatches are as large as ever, and more: memory stays as it is, and a phase is
one more program.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from jaxpar.errors import refuse


@dataclass(frozen=True)
class Growth:
    """When a batch grows, and how much.

    Attributes:
      phases: Steps after which a phase begins, rising, each with the factor by which it is larger than the one before.

    Source: Smith, Kindermans, Ying, Le (2018), arXiv:1711.00489: a rate that is divided by a factor, and a batch that
    is multiplied by it, leave updates the same temperature; see `noise`.
    """

    phases: tuple[tuple[int, int], ...] = ()

    @property
    def factors(self) -> tuple[int, ...]:
        """How many draws a step of each phase takes, the first phase's 1 among them."""
        found = [1]
        for _, factor in self.phases:
            found.append(found[-1] * factor)
        return tuple(found)

    def factor(self, step: int) -> int:
        """Returns how many draws a step, from 0, takes."""
        return self.factors[sum(begin <= step for begin, _ in self.phases)]

    def drawn(self, steps: int) -> int:
        """Returns how many draws the first `steps` steps take."""
        begins = [0, *(begin for begin, _ in self.phases)]
        ends = [*begins[1:], steps]
        return sum(
            factor * max(0, min(end, steps) - begin)
            for factor, begin, end in zip(self.factors, begins, ends, strict=True)
        )

    def draws(self, step: int) -> range:
        """Returns the draws that a step, from 0, takes."""
        return range(self.drawn(step), self.drawn(step + 1))

    def said(self, batch: int) -> str:
        """Returns the phases of a batch in words; "" where it stays as it is."""
        if not self.phases:
            return ""
        each = zip(self.phases, self.factors[1:], strict=True)
        later = ", ".join(f"{batch * factor} after {begin}" for (begin, _), factor in each)
        return f"{batch} examples per step, {later} steps: {len(set(self.factors))} programs"


def check_phases(phases: Sequence[tuple[int, float]], key: str, steps: int = 2**31) -> None:
    """Refuses phases that do not follow one another, or change nothing.

    Args:
      phases: Steps after which each begins, and its factor.
      key: How the user calls them.
      steps: Of the run.

    Raises:
      JaxparError: With the first phase that is wrong.
    """
    before = 0
    for begin, factor in phases:
        got = f"{key} = {[list(phase) for phase in phases]}"
        if not before < begin < steps:
            raise refuse(
                f"{got}: a phase begins after {begin} steps",
                rule=f"phases begin one after the other, after step {before} here, and before the run ends",
                fix=f"[{min(before + 1, steps - 1)}, {factor}]",
            )
        if not 1 < factor < 2**31:
            raise refuse(f"{got}: a factor of {factor}", rule="each phase has a factor above 1", fix=f"[{begin}, 2]")
        before = begin
