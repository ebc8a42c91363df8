"""Decides after which steps a checkpoint is written: every `every` steps, and when the last is `minutes` old.

Processes have different clocks, but must save after the same step. So process 0 alone reads its clock, and broadcasts
after how many steps it reads it again: half of the remaining time at the pace so far. That is about ten messages
between two checkpoints, and none in the other steps.
"""

import time

from jaxpar.checkpoint import processes
from jaxpar.checkpoint.spec import Checkpoints

FARTHEST = 2**30  # maximum steps to the next reading of the clock, which is broadcast as an int32


def seconds() -> float:
    """Seconds of this process's monotonic clock."""
    return time.monotonic()


class SaveSchedule:
    """Decides after each step whether a checkpoint is due; all processes must ask after the same steps.

    Args:
      spec: The `[checkpoint]` table.
      start: The step whose state is saved already.
    """

    def __init__(self, spec: Checkpoints, *, start: int):
        self.spec = spec
        self.mark_saved(start)

    def mark_saved(self, step: int) -> None:
        """Restarts the interval: the state of this step is saved."""
        self._since, self._step, self._look = seconds(), step, step + 1

    def may_save(self, step: int) -> bool:
        """Whether `is_due` may save or broadcast after this step; then no later step may be in flight."""
        return self._is_every(step) or (self.spec.minutes > 0 and step >= self._look)

    def is_due(self, step: int) -> bool:
        """Whether to save the state after this step; if so, the interval restarts."""
        if not self._is_every(step):
            if not self.may_save(step):
                return False
            if wait := processes.broadcast(self._steps_left(step)):
                self._look = step + wait
                return False
        self.mark_saved(step)
        return True

    def _is_every(self, step: int) -> bool:
        return self.spec.every > 0 and step % self.spec.every == 0

    def _steps_left(self, step: int) -> int:
        """Number of steps until the clock is read again; 0 if the last checkpoint is too old."""
        elapsed = seconds() - self._since
        remaining = self.spec.minutes * 60 - elapsed
        if remaining <= 0:
            return 0
        pace = elapsed / (step - self._step)
        return max(1, int(min(remaining / 2 / pace, FARTHEST))) if pace > 0 else 1
