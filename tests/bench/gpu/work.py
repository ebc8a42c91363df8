"""What a stage works with: its sizes, a clock, and measurements that are taken once."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.measure import record
from jaxpar.plan.machine.hardware import Hardware

from ..gpu.lines import Lines


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one stage.

    Attributes:
      stage: Its name.
      sizes: Of this run, as its row of the table says.
      lines: Where measurements go.
      hardware: The planner's constants of this GPU; in a rehearsal those of another.
    """

    stage: str
    sizes: Any
    lines: Lines
    hardware: Hardware

    @property
    def rehearsal(self) -> bool:
        """Whether no time means anything: sizes are tiny, and there may be no GPU."""
        return self.lines.identity.rehearsal

    @property
    def folder(self) -> Path:
        """The folder of the record, for the few files that a stage may leave beside it."""
        return self.lines.path.parent

    def measure(self, what: str, take: Callable[[], Mapping[str, Any]]) -> dict[str, Any]:
        """Returns a measurement: the line that is there from an earlier try, or else one that is taken and added now.

        Args:
          what: Its name within the stage, by which it is predicted and found again.
          take: Returns its numbers: seconds, bytes, FLOP per second, in words that say which.
        """
        return self.lines.find(self.stage, what) or self.lines.add(stage=self.stage, what=what, **take())

    def absent(self, what: str, why: str) -> None:
        """Says that something is not measured here, and why."""
        self.measure(what, lambda: {"absent": why})

    def once(self, build: Callable[[int], Callable[[Any], Any]], x: Any, *, rounds: int, pretended: float) -> float:
        """Returns the seconds of one more repeat, as `measure.record.once` does; in a rehearsal what is pretended.

        A rehearsal runs the programs all the same.
        """
        if not self.rehearsal:
            return record.once(build, x, rounds=rounds)
        for repeats in record.REPEATS:
            x = jax.block_until_ready(build(repeats)(x))
        return pretended
