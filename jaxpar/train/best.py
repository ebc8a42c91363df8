"""The best evaluation of a run so far, and whether the run has waited long enough for a better one."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from jaxpar.errors import refuse

Row = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Best:
    """How evaluations are compared, and how long a run waits for a better one.

    All is read off the rows of the run's metrics, so that one that is resumed, or rolled back, waits as it would have.

    Attributes:
      metric: What is compared, such as eval_loss.
      lowest: Whether the lowest is the best.
      patience: Evaluations in a row that are no better than the best before them, after which the run ends; 0 for none.
    """

    metric: str = "eval_loss"
    lowest: bool = True
    patience: int = 0

    def check(self, found: Row, *, keeps: int) -> None:
        """Refuses a metric that an evaluation does not have; the usual one only where evaluations are compared.

        Without examples that are held out, sets by name have no `eval_loss` beside their own.

        Args:
          found: The metrics of an evaluation.
          keeps: How many checkpoints stay as the best.

        Raises:
          JaxparError: With those that it has.
        """
        if self.metric == Best.metric and not self.patience and not keeps:
            return
        # without a loss there is nothing to compare: all members of a population may be lost
        losses = [name for name in found if name.endswith("_loss")]
        if self.metric not in found and losses:
            raise refuse(
                f"checkpoint.best = {self.metric!r}",
                rule=f"an evaluation has {', '.join(name for name in found if name.startswith('eval_'))}",
                fix=f'checkpoint.best = "{losses[0]}", or an entry of that name in what the loss returns',
            )

    def order(self, score: float) -> float:
        """Returns a number that is smaller for a better score."""
        return score if self.lowest else -score

    def waited(self, rows: Sequence[Row]) -> tuple[int, Row | None]:
        """Returns the number of evaluations since the best one, and the row of the best one.

        Args:
          rows: Those with an evaluation, oldest first. A score that is no number is no better than any.
        """
        best, since = None, 0
        for row in rows:
            score = row.get(self.metric)
            if score is not None and (best is None or self.order(score) < self.order(best[self.metric])):
                best, since = row, 0
            else:
                since += 1
        return since, best

    def is_among(self, count: int, rows: Sequence[Row], step: int) -> bool:
        """Returns whether the evaluation of a step is one of the best so many; of equal ones the earlier is better.

        Args:
          count: How many are the best.
          rows: Those with an evaluation, oldest first.
          step: The step of one of them.
        """
        scores = [(self.order(score), row["step"]) for row in rows if (score := row.get(self.metric)) is not None]
        return any(each == step for _, each in sorted(scores)[:count])

    def over(self, rows: Sequence[Row]) -> str:
        """Returns why a run ends after these evaluations; "" where it goes on."""
        since, best = self.waited(rows)
        if not self.patience or since < self.patience:
            return ""
        seen = "none is a number" if best is None else f"the best is {best[self.metric]:.6g}, of step {best['step']}"
        return f"train.patience: {since} evaluations without a better {self.metric}; {seen}"
