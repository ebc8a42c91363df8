"""Published runs beside their predictions, as lines of a terminal."""

from collections.abc import Sequence

import numpy as np

from jaxpar.plan.measurements.prediction_errors import coverage, estimate, load_published

from ..published.constants import CONSTANTS
from ..published.held_out import HeldOut, after_one, residual
from ..published.judged import Judged, Score, grouped, score

HEAD = ("runs", "bias", "mean", "median", "95 %", "worst", "within 20 %", "rank of MFU")


def lines(judged: Sequence[Judged]) -> str:
    """Returns one line for each run: predicted, published, error, and its three largest causes."""
    rows = [f"{'line':>5}  {'run':<48}{'published':>11}{'predicted':>11}{'error':>9}   where the time goes"]
    for each in judged:
        run = each.run
        rows.append(
            f"{run.line:>5}  {run.name:<48.48}{run.seconds:>9.2f} s{each.predicted:>9.2f} s{each.error:>+9.1%}   "
            + causes(each)
        )
    return "\n".join(rows)


def causes(each: Judged) -> str:
    """Returns the three largest causes of a prediction, in words."""
    most = sorted(each.time.items(), key=lambda item: -item[1])[:3]
    return ", ".join(f"{cause} {seconds / each.predicted:.0%}" for cause, seconds in most)


def by_group(judged: Sequence[Judged], by: str) -> str:
    """Returns one line for each group, and one for all."""
    rows = [f"{by:<40}" + "".join(f"{each:>13}" for each in HEAD)]
    rows += [f"{name:<40.40}{_cells(score(some))}" for name, some in grouped(judged, by).items()]
    return "\n".join([*rows, f"{'all':<40}{_cells(score(judged))}"])


def _cells(found: Score) -> str:
    rank = "" if found.rank is None else f"{found.rank:.3f}"
    shares = (found.mean, found.median, found.most, found.worst, found.within)
    return f"{found.runs:>13}{found.bias:>+13.1%}" + "".join(f"{each:>13.1%}" for each in shares) + f"{rank:>13}"


def constants(found: HeldOut) -> str:
    """Returns the fitted constants: what they are usually, on all runs, and between which values without a group."""
    rows = [f"{'constant':<42}{'usual':>11}{'fitted':>11}{'least':>11}{'most':>11}   of those without a group"]
    for name, constant in CONSTANTS.items():
        each = [values[name] for values in found.without.values()]
        numbers = (constant.usual, found.values[name], min(each), max(each))
        rows.append(f"{name:<42}" + "".join(f"{number:>11.4g}" for number in numbers))
    return "\n".join(rows)


def after(judged: Sequence[Judged], by: str) -> str:
    """Returns the errors after one calibration run for each group: of every choice of it, and of the central one."""
    rows = [f"{'after one calibration run':<40}{'runs':>13}{'every choice':>14}{'central one':>13}"]
    groups = {name: some for name, some in grouped(judged, by).items() if len(some) > 1}
    found = np.array([after_one(some) for some in groups.values()]).reshape(-1, 2)
    sizes = np.array([len(some) for some in groups.values()])
    lines = dict(zip(groups, zip(sizes, found, strict=True), strict=True))
    if groups:
        total = int(sizes.sum())
        lines |= {"mean of groups": (total, found.mean(0)), "mean of runs": (total, sizes @ found / total)}
    rows += [f"{name:<40.40}{count:>13}{each[0]:>14.1%}{each[1]:>13.1%}" for name, (count, each) in lines.items()]
    return "\n".join(rows)


def interval(judged: Sequence[Judged]) -> str:
    """Returns the share of runs inside their stated error interval, which runs of other systems give, as a line."""
    share = coverage([residual(each) for each in judged])
    return f"stated interval of 90 %, from runs of other systems: holds {share:.1%} of {len(judged)} runs"


def package_interval(judged: Sequence[Judged]) -> str:
    """Returns the share of runs inside the interval that a plan states, from the errors in the package, as a line."""
    inside = [abs(run.error) <= estimate(run, load_published()).interval for run in map(residual, judged)]
    return f"stated interval of 90 %, as a plan states it: holds {sum(inside) / len(inside):.1%} of {len(inside)} runs"
