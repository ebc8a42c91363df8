"""Predictions of published runs, their errors, and how good they are in each group."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from jaxpar.errors import JaxparError
from jaxpar.plan.time import StepTime, step_time
from jaxpar.plan.validation import rank_correlation

from ..published.read import Run

BY: Mapping[str, Callable[[Run], str]] = {  # what groups are made of
    "group": lambda run: run.group,
    "system": lambda run: run.row["system"],
    "gpu": lambda run: run.gpu,
    "source": lambda run: run.source,
    "model": lambda run: run.row["model"],
}


@dataclass(frozen=True, kw_only=True)
class Judged:
    """A published run beside its prediction.

    Attributes:
      run: The run.
      time: Seconds of a step, by cause; modelled.
    """

    run: Run
    time: StepTime

    @property
    def predicted(self) -> float:
        """Seconds of a step; modelled."""
        return float(self.time.total)

    @property
    def error(self) -> float:
        """Predicted over published, less 1: below 0 where the prediction is too fast."""
        return self.predicted / self.run.seconds - 1

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        run = self.run
        return {
            "line": run.line, "name": run.name, "group": run.group, "gpu": run.gpu, "source": run.source,
            "published": run.seconds, "predicted": self.predicted, "error": self.error,
            "published_mfu": run.mfu(run.seconds), "predicted_mfu": run.mfu(self.predicted),
            "causes": dict(self.time),
        }  # fmt: skip


def judge(run: Run) -> Judged:
    """Returns a run with its prediction, by the run's own hardware and software."""
    return Judged(run=run, time=step_time(run.shape, run.candidate, run.hardware, run.software).plain)


def judge_all(runs: Iterable[Run]) -> list[Judged]:
    """Returns all runs with their predictions.

    Raises:
      JaxparError: With every line whose schedule does not take its numbers.
    """
    found, problems = [], []
    for run in runs:
        try:
            found.append(judge(run))
        except JaxparError as error:
            problems += [replace(each, got=f"line {run.line}: {each.got}") for each in error.problems]
    if problems:
        raise JaxparError(*problems)
    return found


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How far predictions of some runs are off; shares of the published seconds.

    Attributes:
      runs: How many.
      bias: Mean of the errors, with their signs.
      mean: Mean of their sizes.
      median: Median of those.
      most: What 95 % of them stay below.
      worst: The largest.
      within: Share of the runs whose error is at most a fifth.
      rank: Spearman's correlation of predicted and published MFU; None of fewer than three runs, or of equal ones.
    """

    runs: int
    bias: float
    mean: float
    median: float
    most: float
    worst: float
    within: float
    rank: float | None


def score(judged: Sequence[Judged]) -> Score:
    """Returns how good predictions are."""
    errors = np.array([each.error for each in judged])
    size = np.abs(errors)
    predicted = [each.run.mfu(each.predicted) for each in judged]
    published = [each.run.mfu(each.run.seconds) for each in judged]
    ranked = len(judged) > 2 and min(np.ptp(predicted), np.ptp(published)) > 0
    return Score(
        runs=len(judged), bias=float(errors.mean()), mean=float(size.mean()), median=float(np.median(size)),
        most=float(np.quantile(size, 0.95)), worst=float(size.max()), within=float((size <= 0.2).mean()),
        rank=rank_correlation(predicted, published) if ranked else None,
    )  # fmt: skip


def grouped(judged: Iterable[Judged], by: str) -> dict[str, list[Judged]]:
    """Returns the runs of each group, in the order of the table; `by` is one of `BY`."""
    found: dict[str, list[Judged]] = {}
    for each in judged:
        found.setdefault(BY[by](each.run), []).append(each)
    return found
