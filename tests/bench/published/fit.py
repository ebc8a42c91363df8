"""Constants fitted to published runs: the most probable ones, given what is usual of them and how runs scatter.

    least   sum over runs       w rho(log(predicted / published) / 0.04)
          + sum over constants  (log(value / usual) / spread)^2

rho is Charbonnier's, 2 c^2 (sqrt(1 + (r / c)^2) - 1), so that a run that is far off, whose table may be wrong, counts
linearly; w lets a group count for eight runs at most, and a run of a paper, whose settings are all told, for two.
Solved by Gauss and Newton's steps, reweighted.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from ..published.constants import CONSTANTS, machine
from ..published.judged import Judged, judge
from ..published.read import Run

SCATTER = 0.04  # of runs around the model, as a share: assumed
FAR = 1.5  # times that, past which runs count linearly
MOST = 8  # runs for which a group counts
PAPER = 2.0  # runs for which one of a paper counts; tables on the web leave settings to be guessed
_STEP, _TURNS, _SOLVES = 0.05, 4, 40

Values = dict[str, float]


def predicted(run: Run, values: Mapping[str, float]) -> Judged:
    """Returns a run with its prediction by these values of the constants."""
    hardware, software = machine(run, values)
    return judge(replace(run, hardware=hardware, software=software))


def values_of(place: np.ndarray) -> Values:
    """Returns the constants at a place: each so many of its spreads from what is usual."""
    return {
        name: min(each.most, each.usual * math.exp(each.spread * float(x)))
        for (name, each), x in zip(CONSTANTS.items(), place, strict=True)
    }


def residuals(runs: Sequence[Run], place: np.ndarray) -> np.ndarray:
    """Returns log(predicted / published) of each run."""
    values = values_of(place)
    return np.array([math.log1p(predicted(run, values).error) for run in runs])


def slopes(runs: Sequence[Run], place: np.ndarray) -> np.ndarray:
    """Returns by how much each run's logarithm grows with each constant, in spreads. Shape [runs, constants]."""
    base, found = residuals(runs, place), np.zeros((len(runs), len(place)))
    for column, constant in enumerate(CONSTANTS.values()):
        moved = place.copy()
        moved[column] += _STEP
        which = [i for i, run in enumerate(runs) if constant.concerns(run)]
        found[which, column] = (residuals([runs[i] for i in which], moved) - base[which]) / _STEP
    return found


def solve(runs: Sequence[Run], rest: np.ndarray, slope: np.ndarray, place: np.ndarray) -> np.ndarray:
    """Returns where the sum is least, if logarithms grow as at this place.

    Args:
      runs: Those that count.
      rest: Their residuals at the place.
      slope: Their slopes there.
      place: Where that is.
    """
    sizes = Counter(run.group for run in runs)
    weight = np.array([min(MOST, sizes[run.group]) / sizes[run.group] for run in runs])
    weight *= np.array([PAPER if run.source.startswith("arXiv") else 1.0 for run in runs])
    away = np.zeros(len(place))
    for _ in range(_SOLVES):
        error = (rest + slope @ away) / SCATTER
        each = np.sqrt(weight / np.sqrt(1 + (error / FAR) ** 2))
        rows = np.concatenate([slope / SCATTER * each[:, None], np.eye(len(place))])
        goal = np.concatenate([-rest / SCATTER * each, -place])
        away = np.linalg.lstsq(rows, goal, rcond=None)[0]
    return place + away


def fit(runs: Sequence[Run]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the place of the constants that runs speak for, with residuals and slopes there."""
    place = np.zeros(len(CONSTANTS))
    slope = slopes(runs, place)
    for turn in range(_TURNS):
        place = np.clip(solve(runs, residuals(runs, place), slope, place), -6, 6)
        if turn == _TURNS // 2 - 1:
            slope = slopes(runs, place)
    return place, residuals(runs, place), slopes(runs, place)
