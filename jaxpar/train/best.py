"""The best evaluation of a run so far, and early stopping."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse

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
