"""Decides after which steps a checkpoint is written: every `every` steps, and when the last is `minutes` old.

Each process has a clock of its own, and all must save after the same step. So process 0 alone looks at its clock, and
tells the others how many steps later it will look again: half of what is left at the pace so far. That is a message
some ten times between two checkpoints, and none in the other steps.
"""

import time

from jaxpar.checkpoint import processes
from jaxpar.checkpoint.spec import Checkpoints

FARTHEST = 2**30  # steps to the next look, at most: it travels as an int32


def seconds() -> float:
    """Returns the seconds of this process's monotonic clock."""
    return time.monotonic()


class Due:
    """Decides after each step whether a checkpoint is due; several processes all ask after the same steps.

    Args:
      spec: The `[checkpoint]` table.
      start: The step whose state is saved already.
    """

    def __init__(self, spec: Checkpoints, *, start: int):
        self.spec = spec
        self.saved(start)

    def saved(self, step: int) -> None:
        """Starts counting anew: the state of this step is saved."""
        self._since, self._step, self._look = seconds(), step, step + 1

    def is_asked(self, step: int) -> bool:
        """Returns whether `is_due` may save or broadcast after this step; then no later step may be in flight."""
        return self._is_every(step) or (self.spec.minutes > 0 and step >= self._look)

    def is_due(self, step: int) -> bool:
        """Returns whether the state after this step is to be saved; if so, counting starts anew."""
        if not self._is_every(step):
            if not self.is_asked(step):
                return False
            if wait := processes.from_first(self._steps_left(step)):
                self._look = step + wait
                return False
        self.saved(step)
        return True

    def _is_every(self, step: int) -> bool:
        return self.spec.every > 0 and step % self.spec.every == 0

    def _steps_left(self, step: int) -> int:
        """Returns the number of steps after which to look again; 0 where the last checkpoint is too old by now."""
        past = seconds() - self._since
        left = self.spec.minutes * 60 - past
        if left <= 0:
            return 0
        pace = past / (step - self._step)
        return max(1, int(min(left / 2 / pace, FARTHEST))) if pace > 0 else 1
