"""The reaction to a loss or gradient that is NaN or infinite, and to spikes of the loss.

loss or gradients nan or inf,      stop       an error that names it; nothing is saved from then on
or a loss far above those    ─►    skip       inside the compiled step: its update is not taken
before it                          rollback   the newest checkpoint, and on past the batches since it

With `stop` and `rollback` the compiled step is what it is without them: the host looks at its metrics. A batch in which
nothing counts is no fault: its loss is 0/0, its gradient zero; the run says so and goes on.
"""

import math
import statistics
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from jaxpar.errors import JaxparError, Problem, check_ranges, refuse

WINDOW = 32  # losses whose median a spike is measured by
FEWEST = 8  # losses without which nothing is a spike
# a job that goes on with another rate than it had is refused without the second half
LOWER_RATE = (
    "go on from the last checkpoint with a lower optimizer.learning_rate or a longer optimizer.warmup, and (in a job) "
    'run.changed = ["optimizer.learning_rate", "optimizer.warmup"]'
)
LAG = 2  # the newest loss that a limit knows is of two steps before, on every layout and after every resume


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The policy for losses, gradients and batches that go wrong.

    Attributes:
      on_bad_step: Where loss, gradients or parameters are nan or inf, or the loss is a spike: stop; skip (the update
        is not taken, steps and data go on); or rollback (to the newest checkpoint, or to one before it if that fails
        at once, and on past the batches since it).
      on_bad_batch: Where a batch holds what cannot be, found before it is fed: stop, or skip (the next batch takes
        its place, and all later ones move up).
      spike: A loss above so many times the median of the last 32 good ones is bad; 0 looks for none.
      skips: Steps or batches in a row that may be skipped, before the run stops.
      rollbacks: How often a run may go back, before it stops.
    """

    on_bad_step: Literal["stop", "skip", "rollback"] = "stop"
    on_bad_batch: Literal["stop", "skip"] = "stop"
    spike: float = 0.0
    skips: int = 10
    rollbacks: int = 3

    def __post_init__(self):
        check_ranges(self, "faults", {"spike": (0.0, 1e9), "skips": (1, 2**31 - 1), "rollbacks": (1, 2**31 - 1)})
        if 0 < self.spike <= 1:
            raise refuse(
                f"faults.spike = {self.spike}",
                rule="faults.spike is a multiple of the usual loss above 1, or 0 to look for no spikes",
                fix="spike = 3.0",
            )


def learns_nothing(values: Mapping[str, Any]) -> bool:
    """Returns whether nothing in the batch of a step counted: its loss is 0/0, nan, and its gradient is zero."""
    return values.get("tokens") == 0 and values["grad_norm"] == 0


class BadStep(JaxparError):
    """A step whose loss or gradients are not finite, or whose loss is a spike.

    Attributes:
      step: Which one, from 1.
    """

    def __init__(self, step: int, problem: Problem):
        self.step = step
        super().__init__(problem)


class Watch:
    """Judges each step's numbers, and knows the limit that a spike is above.

    Args:
      faults: The `[faults]` table.
      rows: The metrics of earlier steps of the run, in order.
      span: Steps that a rollback may go back, over which the losses before are remembered.
      skipped: Steps that were skipped before.

    Attributes:
      skipped: Steps that were skipped until now: so much is the optimizer's own count behind.
    """

    def __init__(
        self, faults: Faults | None = None, rows: Iterable[Mapping[str, Any]] = (), *, span: int = 0, skipped: int = 0
    ):
        self.faults, self.skipped = faults or Faults(), skipped
        self._good: deque[tuple[int, float]] = deque(maxlen=WINDOW + LAG + span)
        self._in_a_row = 0
        for row in rows:
            if learns_nothing(row):
                continue
            self._in_a_row = self._in_a_row + 1 if row.get("skipped") else 0
            if not row.get("skipped") and row["loss"] is not None:
                self._good.append((row["step"], row["loss"]))

    @property
    def is_skipping(self) -> bool:
        """Whether the last step was skipped."""
        return self._in_a_row > 0

    def limit(self, step: int) -> float:
        """Returns the loss above which a step is a spike; inf where none is, also where losses are not positive."""
        if not self.faults.spike:
            return math.inf
        known = [loss for at, loss in self._good if at <= step - LAG][-WINDOW:]
        usual = statistics.median(known) if len(known) >= FEWEST else 0.0
        return self.faults.spike * usual if usual > 0 else math.inf

    def judge(self, step: int, values: Mapping[str, float]) -> bool:
        """Returns whether a step was skipped.

        Raises:
          BadStep: If its numbers are bad and it was not skipped, or it was one too many.
        """
        if learns_nothing(values):
            self.skipped += (skipped := bool(values.get("skipped")))
            return skipped
        limit = self.limit(step)
        good = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"]) and values["loss"] <= limit
        skips = self.faults.on_bad_step == "skip"
        if not values["skipped"] if skips else good:
            self._good.append((step, values["loss"]))
            self._in_a_row = 0
            return False
        self._in_a_row += skips
        if not skips or self._in_a_row > self.faults.skips:
            raise BadStep(step, _bad(step, values, limit, self._in_a_row if skips else 0))
        self.skipped += 1
        return True

    def rewind(self, step: int) -> None:
        """Forgets the steps after this one."""
        while self._good and self._good[-1][0] > step:
            self._good.pop()


def _bad(step: int, values: Mapping[str, float], limit: float, skipped: int) -> Problem:
    """Returns the problem with a step's loss or gradients."""
    loss, norm = values["loss"], values["grad_norm"]
    rule = "training goes on while the loss is finite; nothing is saved after it is not"
    fix = LOWER_RATE
    if skipped:
        got = f"step {step} is bad (loss {loss}, grad_norm {norm}), the last of {skipped} in a row"
        return Problem(got, f"faults.skips = {skipped - 1} may be skipped in a row", fix)
    if loss > limit and math.isfinite(loss):
        got = f"the loss of step {step} is {loss:.6g} (grad_norm {norm:.6g}), a spike above {limit:.6g}"
        return Problem(got, "a loss stays below faults.spike times the median of those before it", fix)
    if step == 1:
        fix = "the data (nan, a label or token that is out of range, a mask of zeros) or the model's own arithmetic"
    if math.isnan(loss) and math.isfinite(norm):
        fix = "a loss that returns (sum, count): a mean of its own is 0/0 where a mask leaves nothing; or other data"
    if math.isfinite(loss):
        return Problem(f"the gradients of step {step} are not finite (grad_norm {norm}, loss {loss:.6g})",
            "training goes on while the gradients are finite; nothing is saved after they are not", fix)  # fmt: skip
    return Problem(f"the loss of step {step} is {loss} (grad_norm {norm})", rule, fix)
