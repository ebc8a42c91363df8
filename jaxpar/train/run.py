"""`Run`, the parts of a run that the loop, the rollback and the job share, its best evaluation, and its `Outcome`."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from jaxpar.checkpoint import Checkpoints, Store
from jaxpar.data.spec import Source
from jaxpar.data.streams.sets import EvaluationSet
from jaxpar.data.validate import BatchSpec
from jaxpar.errors import refuse
from jaxpar.optim.optimizer import Growth
from jaxpar.step.state import State
from jaxpar.step.step import Step
from jaxpar.train.faults import SkippedBatches, Watch
from jaxpar.train.metrics import Log
from jaxpar.train.noise import Noise
from jaxpar.train.progress import Progress
from jaxpar.train.step_trace import StepTrace
from jaxpar.train.watchdog.thread import SingleProcess

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Best:
    """The comparison of evaluations, and the patience of early stopping.

    All decisions depend on the rows of metrics only, so a resumed or rolled-back run decides like an uninterrupted one.

    Attributes:
      metric: The metric by which evaluations are compared, such as eval_loss.
      lowest: Whether the lowest value is the best.
      patience: Evaluations in a row without a new best value, after which the run ends; 0 disables early stopping.
    """

    metric: str = "eval_loss"
    lowest: bool = True
    patience: int = 0

    def check(self, found: Row, *, keeps: int) -> None:
        """Refuses a metric that evaluations do not have; the default only if something compares evaluations.

        A run with named sets but without held-out examples of its source has no `eval_loss`.

        Args:
          found: The metrics of an evaluation.
          keeps: Number of best checkpoints that are retained.

        Raises:
          JaxparError: If `found` lacks the metric; the error lists the metrics that it has.
        """
        if self.metric == Best.metric and not self.patience and not keeps:
            return
        # an evaluation without any loss is no error: all members of a population may have failed
        losses = [name for name in found if name.endswith("_loss")]
        if self.metric not in found and losses:
            raise refuse(
                f"checkpoint.best = {self.metric!r}",
                rule=f"an evaluation has {', '.join(name for name in found if name.startswith('eval_'))}",
                fix=f'checkpoint.best = "{losses[0]}", or an entry of that name in what the loss returns',
            )

    def order(self, score: float) -> float:
        """Returns a sort key: the smaller, the better the score."""
        return score if self.lowest else -score

    def evaluations_since_best(self, rows: Sequence[Row]) -> tuple[int, Row | None]:
        """Returns the number of evaluations since the best one, and the row of the best one.

        Args:
          rows: The rows with an evaluation, oldest first. A missing or null score is never the best.
        """
        best, since = None, 0
        for row in rows:
            score = row.get(self.metric)
            if score is not None and (best is None or self.order(score) < self.order(best[self.metric])):
                best, since = row, 0
            else:
                since += 1
        return since, best

    def is_among_best(self, count: int, rows: Sequence[Row], step: int) -> bool:
        """Returns whether the evaluation of a step is among the `count` best; of equal scores the earlier is better.

        Args:
          count: Number of best evaluations.
          rows: The rows with an evaluation, oldest first.
          step: The step of one of the rows.
        """
        scores = [(self.order(score), row["step"]) for row in rows if (score := row.get(self.metric)) is not None]
        return any(each == step for _, each in sorted(scores)[:count])

    def stop_reason(self, rows: Sequence[Row]) -> str:
        """Returns the reason to end the run after these evaluations; "" if it goes on."""
        since, best = self.evaluations_since_best(rows)
        if not self.patience or since < self.patience:
            return ""
        seen = "none is a number" if best is None else f"the best is {best[self.metric]:.6g}, of step {best['step']}"
        return f"train.patience: {since} evaluations without a better {self.metric}; {seen}"


@dataclass(frozen=True, kw_only=True)
class Run:
    """The parts of a run, besides its state.

    Attributes:
      step: The compiled step.
      source: The source of the batches.
      steps: Updates of the whole run.
      global_batch: Examples per step, over all devices; in the first phase, if the batch grows.
      eval_every: Steps between evaluations; 0 evaluates at the end only.
      eval_batches: Most batches per evaluation and set; 0 evaluates all held-out batches.
      ahead: Batches that a thread reads ahead; with 0 the host reads one while the devices compute the step before.
      sets: Evaluation sets by name, besides the examples that the source holds out.
      checkpoints: When checkpoints are written, and which are retained.
      store: Writes the checkpoints; None writes none.
      log: Writes the rows of metrics; None writes none.
      progress: Prints the progress; None prints nothing.
      learning_rate: Maps the number of an update, from 0, to its learning rate, for the rows.
      watchdog: Watches the other processes of the run.
      watch: Checks the metrics of each step.
      good: The check that batches must pass; None checks none.
      skipped: The batches that the run skips; None if it cannot skip any.
      noise: Measures the noise of gradients and updates.
      growth: The phases of a growing batch.
      derived: Evaluation metrics that are computed from the mean loss: names of `DERIVED`.
      best: The comparison of evaluations, and the patience of early stopping.
      trace: The trace of some steps by the profiler.
      larger: The compiled steps of later phases, by the factor by which their batch is larger than the first.
    """

    step: Step
    source: Source
    steps: int
    global_batch: int
    eval_every: int = 0
    eval_batches: int = 0
    ahead: int = 0
    sets: Mapping[str, EvaluationSet] = field(default_factory=dict)
    checkpoints: Checkpoints = field(default_factory=Checkpoints)
    store: Store | None = None
    log: Log | None = None
    progress: Progress | None = None
    learning_rate: Callable[[int], float] | None = None
    watchdog: SingleProcess = field(default_factory=SingleProcess)
    watch: Watch = field(default_factory=Watch)
    good: BatchSpec | None = None
    skipped: SkippedBatches | None = None
    noise: Noise = field(default_factory=Noise)
    growth: Growth = field(default_factory=Growth)
    derived: tuple[str, ...] = ()
    best: Best = field(default_factory=Best)
    trace: StepTrace = field(default_factory=StepTrace)
    larger: Mapping[int, Step] = field(default_factory=dict)

    def compiled_step(self, step: int) -> Step:
        """Returns the compiled step for the step number `step`, from 0."""
        factor = self.growth.factor(step)
        return self.step if factor == 1 else self.larger[factor]


@dataclass(frozen=True, kw_only=True, repr=False)
class Outcome:
    """The outcome of a run.

    Attributes:
      state: The last state.
      last: The row of metrics of the last step that this process trained; empty if it trained none.
      stopped_by: Name of the signal that ended the run early, or None.
    """

    state: State
    last: dict[str, Any]
    stopped_by: str | None

    def __repr__(self) -> str:
        loss = f", loss {self.last['loss']:.4g}" if "loss" in self.last else ""
        stopped = f", stopped by {self.stopped_by}" if self.stopped_by else ""
        return f"<outcome: {repr(self.state).removeprefix('<state: ').removesuffix('>')}{loss}{stopped}>"
