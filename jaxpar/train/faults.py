"""The reaction to NaN or infinity in losses and gradients, and to loss spikes, and the batches that it skips.

loss or gradients nan or inf,      stop       raise an error that names the step; nothing is saved afterwards
or a loss far above the      ─►    skip       the compiled step leaves the state unchanged
recent losses                      rollback   restore the newest checkpoint and skip the batches since it

`stop` and `rollback` do not change the compiled step: the host checks its metrics. A batch without any counted example
is no fault: its loss is 0/0 and its gradient zero. The run reports it and goes on.

The index of a step's batch is a pure function of the step and of RUN/skipped_batches.json, so that a resumed run skips
the same ones:

    step   0 1 2 3 4 5 6 ...         step 3 skips 2 batches
    batch  0 1 2 5 6 7 8 ...

If the batch grows, "step" means a draw: one batch of the first phase's size (`jaxpar.optim.optimizer`).
"""

import json
import math
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

from jaxpar.errors import JaxparError, Problem, check_ranges, file_errors, refuse
from jaxpar.files import make_folder, write_json

WINDOW = 32  # number of losses in the median that spikes are compared with
FEWEST = 8  # losses needed before any loss counts as a spike
# the second half is needed because a job refuses to resume with another rate that run.changed does not name
LOWER_RATE = (
    "go on from the last checkpoint with a lower optimizer.learning_rate or a longer optimizer.warmup, and (in a job) "
    'run.changed = ["optimizer.learning_rate", "optimizer.warmup"]'
)
# embeddings and losses of Flax and optax are nan for an id outside of their range, in whichever step it comes
IDS_IN_RANGE = (
    "labels within 0..classes - 1 and tokens within 0..vocab - 1 "
    "(targets that do not count are 0 with a mask of 0, not -100)"
)
LAG = 2  # a limit uses losses up to two steps earlier: the same ones on every layout and after every resume


@dataclass(frozen=True, kw_only=True)
class Faults:
    """The `[faults]` table: the reaction to bad losses, gradients and batches.

    Attributes:
      on_bad_step: Reaction if loss, gradients or parameters are NaN or infinite, or the loss is a spike: stop; skip
        (drop the update and go on with the next batch); or rollback (restore the newest checkpoint, or the one before
        it if its first step is bad again, and skip the batches since it).
      on_bad_batch: Reaction to invalid values in a batch, which a job detects before the step: stop, or skip (the next
        batch takes its place, and all later batches move up). It takes NaN and infinities for corrupt. `jp.fit` checks
        batches before the step only with skip, as a mask may be -inf and a missing label NaN.
      spike: A loss above `spike` times the median of the last 32 good losses is bad; 0 disables the check.
      skips: Most steps or batches skipped in a row; one more stops the run.
      rollbacks: Most rollbacks of a run; one more stops it.
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


def learns_nothing(values: Mapping[str, object]) -> bool:
    """Returns whether the batch of a step has no counted example: its loss is 0/0 (NaN) and its gradient zero."""
    return values.get("tokens") == 0 and values["grad_norm"] == 0


class BadStep(JaxparError):
    """A step whose loss or gradients are not finite, or whose loss is a spike.

    Attributes:
      step: The number of the step, from 1.
    """

    def __init__(self, step: int, problem: Problem):
        self.step = step
        super().__init__(problem)


class Watch:
    """Checks the metrics of each step, and computes the limit above which a loss is a spike.

    Args:
      faults: The `[faults]` table.
      rows: The metrics of earlier steps of the run, in order.
      span: Most steps that a rollback goes back; losses from before them stay in memory.
      skipped: Number of steps that were skipped before.

    Attributes:
      skipped: Number of steps skipped so far; the optimizer's step count is behind by this number.
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
        """Returns the loss above which a step is a spike; inf if none is checked or the median loss is not positive."""
        if not self.faults.spike:
            return math.inf
        known = [loss for at, loss in self._good if at <= step - LAG][-WINDOW:]
        usual = statistics.median(known) if len(known) >= FEWEST else 0.0
        return self.faults.spike * usual if usual > 0 else math.inf

    def judge(self, step: int, values: Mapping[str, float], describe_batch: Callable[[], str] = str) -> bool:
        """Checks the metrics of a step; returns whether it was skipped.

        Args:
          step: The number of the step, from 1.
          values: Its metrics.
          describe_batch: Describes the numbers of its batch that are not finite, if its loss or gradients are not.

        Raises:
          BadStep: If its metrics are bad and it was not skipped, or more than `faults.skips` were skipped in a row.
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
            problem = _bad(step, values, limit, self._in_a_row if skips else 0)
            finite = math.isfinite(values["loss"]) and math.isfinite(values["grad_norm"])
            if not finite and (found := describe_batch()):
                got, fix = f"{problem.got}; in its batch {found}", f"finite numbers there; or {problem.fix}"
                problem = replace(problem, got=got, fix=fix)
            raise BadStep(step, problem)
        self.skipped += 1
        return True

    def rewind(self, step: int) -> None:
        """Removes the losses of the steps after `step`."""
        while self._good and self._good[-1][0] > step:
            self._good.pop()


def _bad(step: int, values: Mapping[str, float], limit: float, skipped: int) -> Problem:
    loss, norm = values["loss"], values["grad_norm"]
    rule = "training goes on while the loss is finite; nothing is saved after it is not"
    fix = LOWER_RATE
    if values.get("refused"):
        got = f"the loss of step {step} is {loss}: experts refuse {values['refused']:.3g} of the choices of tokens"
        rule = 'with experts.overflow = "refuse" no choice exceeds the bound of the experts'
        return Problem(got, rule, 'a larger experts.imbalance (or capacity), or experts.overflow = "spill"')
    if skipped:
        got = f"step {step} is bad (loss {loss}, grad_norm {norm}), the last of {skipped} in a row"
        return Problem(got, f"faults.skips = {skipped - 1} may be skipped in a row", fix)
    if loss > limit and math.isfinite(loss):
        got = f"the loss of step {step} is {loss:.6g} (grad_norm {norm:.6g}), a spike above {limit:.6g}"
        return Problem(got, "a loss stays below faults.spike times the median of those before it", fix)
    if step == 1:
        fix = "the data (nan, a label or token that is out of range, a mask of zeros) or the model's own arithmetic"
    elif math.isnan(loss) and math.isnan(norm):
        fix = f"{IDS_IN_RANGE}; or {LOWER_RATE}"
    if math.isnan(loss) and math.isfinite(norm):
        fix = f"{IDS_IN_RANGE}; or a loss of (sum, count), since a mean of its own is 0/0 where a mask leaves nothing"
    if math.isfinite(loss):
        return Problem(f"the gradients of step {step} are not finite (grad_norm {norm}, loss {loss:.6g})",
            "training goes on while the gradients are finite; nothing is saved after they are not", fix)  # fmt: skip
    return Problem(f"the loss of step {step} is {loss} (grad_norm {norm})", rule, fix)


@dataclass(frozen=True, slots=True)
class Skip:
    """Consecutive batches that the run skips.

    Attributes:
      at: The first step, from 0, that reads a later batch, because earlier ones are skipped.
      past: Number of skipped batches.
      why: The reason.
    """

    at: int
    past: int
    why: str


class SkippedBatches:
    """The batches that a run skips.

    Args:
      folder: The run folder.
      fresh: Whether the run starts from scratch: a file of an earlier run is then deleted.

    Raises:
      JaxparError: If the file is damaged.
    """

    def __init__(self, folder: Path, *, fresh: bool):
        self.file = folder / "skipped_batches.json"
        self.rollbacks, self.all = 0, []
        if fresh and _is_first_process():
            self.file.unlink(missing_ok=True)
        if not fresh and self.file.exists():
            with file_errors(
                self.file,
                rule="the file lists the batches that the run skips, as JSON",
                fix=f"rm {self.file}, if it passed over none",
            ):
                found = json.loads(self.file.read_text())
                self.rollbacks = int(found["rollbacks"])
                self.all = [Skip(int(each["at"]), int(each["past"]), str(each["why"])) for each in found["skipped"]]

    def batch_index(self, step: int) -> int:
        """Returns the index of a step's batch, both from 0."""
        return step + sum(skip.past for skip in self.all if skip.at <= step)

    def skip(self, step: int, why: str) -> None:
        """Skips the batch of a step, from 0: this step and all later ones take the next batch."""
        self._write([*self.all, Skip(step, 1, why)])

    def go_back(self, bad: int, *, to: int, why: str) -> None:
        """Records a rollback to step `to`. Step `to` + 1 then reads the batch that follows the batch of step `bad`."""
        past = self.batch_index(bad - 1) + 1 - self.batch_index(to)
        self.rollbacks += 1
        self._write([*(skip for skip in self.all if skip.at <= to), Skip(to, past, why)])

    def _write(self, skipped: list[Skip]) -> None:
        self.all = skipped
        if _is_first_process():
            make_folder(self.file.parent)
            write_json(self.file, {"rollbacks": self.rollbacks, "skipped": [asdict(skip) for skip in skipped]})


def _is_first_process() -> bool:
    import jax  # a job file is read without it

    return jax.process_index() == 0
