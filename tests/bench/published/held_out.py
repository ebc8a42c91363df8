"""Predictions of published runs by constants that never saw their group, and after one run of it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from jaxpar.plan.measurements.prediction_errors import BELIEF, HeldOutRun

from ..published.fit import Values, fit, predicted, solve, values_of
from ..published.judged import BY, Judged
from ..published.read import Run


@dataclass(frozen=True, kw_only=True)
class HeldOut:
    """What runs and constants say of each other.

    Attributes:
      judged: Every run, predicted by constants that were fitted without its group.
      fitted: Every run, predicted by constants that were fitted on all.
      values: Those constants.
      without: Those of each group that were fitted without it.
    """

    judged: tuple[Judged, ...]
    fitted: tuple[Judged, ...]
    values: Values
    without: dict[str, Values]


def held_out(runs: Sequence[Run], *, by: str = "group") -> HeldOut:
    """Returns predictions of runs whose group the constants never saw.

    The slopes are those at the constants that all runs speak for; where the least lies without a group follows from the
    others alone, but for the curvature between the two. Predictions are then made anew.

    Args:
      runs: All of them.
      by: What groups are made of, one of `judged.BY`.
    """
    place, rest, slope = fit(runs)
    groups = [BY[by](run) for run in runs]
    values = values_of(place)
    found: list[Judged | None] = [None] * len(runs)
    without = {}
    for group in dict.fromkeys(groups):
        kept = np.array([other != group for other in groups])
        others = [run for run, keep in zip(runs, kept, strict=True) if keep]
        without[group] = values_of(solve(others, rest[kept], slope[kept], place))
        for i in np.flatnonzero(~kept).tolist():
            found[i] = predicted(runs[i], without[group])
    return HeldOut(
        judged=tuple(each for each in found if each is not None),
        fitted=tuple(predicted(run, values) for run in runs),
        values=values,
        without=without,
    )


def after_one(some: Sequence[Judged], *, belief: float = BELIEF) -> tuple[float, float]:
    """Returns the mean error of a group's other runs after calibration on one of them; 0 where there is no other.

    The mean over every choice of the one, and that of the most central one: of the median error. All are as
    `jaxpar.plan.measurements.prediction_errors` has it: a pace multiplies all seconds.
    """
    rest = np.log1p([each.error for each in some])
    if len(rest) < 2:
        return 0.0, 0.0
    off = np.abs(np.expm1(rest[None] - belief * rest[:, None]))  # [the one, others]
    means = (off.sum(1) - np.diag(off)) / (len(rest) - 1)
    return float(means.mean()), float(means[np.argmin(np.abs(rest - np.median(rest)))])


def residual(each: Judged) -> HeldOutRun:
    """Returns a held-out prediction as `jaxpar.plan.measurements.prediction_errors` keeps it."""
    run = each.run
    return HeldOutRun(
        system=run.row["system"], group=run.group, stack=run.practice, chip=run.hardware.chip.key,
        devices=run.candidate.devices, pipe=run.candidate.pipe, tensor=run.candidate.tensor, error=round(each.error, 5),
    )  # fmt: skip
