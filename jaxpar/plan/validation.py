"""Compares predictions with compiled programs: ranks decide which layout is taken, errors how many fit."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.plan.search import Plan, Ranked, describe
from jaxpar.units import show_bytes, show_seconds


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A layout as compiled, beside its prediction.

    Attributes:
      ranked: The layout, as predicted.
      seconds: Of a step, modelled from the compiled program; None if it was refused.
      bytes: Of a device, compiled; None if it was refused.
      fits: Whether they fit.
      refusal: Why there is nothing.
      causes: Cause to bytes, compiled.
      exposed: Mesh axes to seconds that computation waits for their collectives, modelled.
      kernels: Seconds of cuDNN's kernels among `seconds`, as predicted: none is compiled where no GPU is.
      squeezed: Share of its FLOP that XLA computes again of its own accord, to fit the memory.
    """

    ranked: Ranked
    seconds: float | None
    bytes: float | None
    fits: bool = True
    refusal: str = ""
    causes: Mapping[str, float] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    kernels: float = 0.0
    squeezed: float = 0.0

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted over compiled less 1: of seconds, and of bytes; 0 where there is nothing to compare with."""
        if not self.seconds or not self.bytes:
            return 0.0, 0.0
        return self.alone / self.seconds - 1, self.ranked.memory.total / self.bytes - 1

    @property
    def alone(self) -> float:
        """Predicted seconds without the wait for the slowest device: what is replayed is one device's program."""
        return self.ranked.time.total - self.ranked.time.get("stragglers", 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns it as JSON has it."""
        return {
            "layout": describe(self.ranked.candidate),
            "refusal": self.refusal,
            "fits": self.fits,
            "predicted": self.ranked.to_dict(),
            "replayed": {"seconds": self.seconds, "kernels": self.kernels, "exposed": dict(self.exposed)},
            "compiled": {"bytes": self.bytes, "squeezed": self.squeezed} | dict(self.causes),
        }

    def __str__(self) -> str:
        predicted = f"{show_seconds(self.alone)}, {show_bytes(self.ranked.memory.total)}"
        line = f"{describe(self.ranked.candidate)}: {predicted}; "
        if not self.seconds or not self.bytes:
            return line + self.refusal
        time, memory = self.errors
        line += f"{show_seconds(self.seconds)} ({time:+.0%}), {show_bytes(self.bytes)} ({memory:+.0%})"
        line += f", {show_seconds(self.kernels)} of it cuDNN's attention, as predicted" * (self.kernels > 0)
        line += f", {self.squeezed:.0%} of its FLOP repeated by XLA to save memory" * (self.squeezed >= 0.005)
        return line + ", DOES NOT FIT" * (not self.fits)


def proposed(plan: Plan, checked: Sequence[Checked] = ()) -> Ranked:
    """Returns the first layout of a plan; of those that were compiled, the first that fits.

    Raises:
      JaxparError: If none of them does.
    """
    if not checked:
        return plan.best[0]
    for each in checked:
        if each.fits:
            return each.ranked
    if not any(each.bytes for each in checked):
        raise refuse(
            f"none of the {len(checked)} layouts that were compiled is one that jaxpar runs: {checked[0].refusal}",
            rule="a plan proposes layouts that compose, and whose compiled program fits",
            fix=f"--verify {2 * len(checked)}, or another number of devices",
        )
    leanest = min((each.bytes for each in checked if each.bytes), default=0.0)
    raise refuse(
        f"none of the {len(checked)} layouts that were compiled fits {show_bytes(plan.question.room)}"
        + (f"; the leanest needs {show_bytes(leanest)}" if leanest else ""),
        rule="a plan proposes layouts whose compiled program fits",
        fix=f"--memory {show_bytes(int(0.8 * plan.question.room)).replace(' ', '')}, which leaves the plan more room",
    )


def compared(checked: Sequence[Checked]) -> str:
    """Returns predictions beside what was compiled, as lines."""
    lines = ["predicted (modelled) beside compiled (bytes) and replayed (seconds, modelled from the compiled program):"]
    lines += [f"  {each}" for each in checked]
    if found := agreement(checked):
        lines.append(summary(found))
    return "\n".join(lines)


def summary(found: Mapping[str, float]) -> str:
    """Returns what `agreement` found, in a line."""
    if not found:
        return "fewer than 3 layouts: nothing to rank"
    return (
        f"{found['layouts']} layouts: rank correlation of seconds {found['rank_correlation']:.3f} (Spearman), mean "
        f"error {found['mean_error_seconds']:.1%}, largest {found['largest_error_seconds']:.1%}; bytes: mean error "
        f"{found['mean_error_bytes']:.1%}, largest {found['largest_error_bytes']:.1%}, "
        f"within 10 % {found['bytes_within_a_tenth']:.0%}"
    )


def agreement(checked: Sequence[Checked]) -> dict[str, float]:
    """Returns how well predictions agree with what was compiled; nothing of fewer than 3 layouts.

    Both times are modelled: those of compiled programs are replayed, not measured.
    """
    both = [each for each in checked if each.seconds]
    if len(both) < 3:
        return {}
    times, bytes_ = ([abs(each.errors[i]) for each in both] for i in (0, 1))
    return {
        "layouts": len(both),
        "rank_correlation": rank_correlation([each.alone for each in both], [each.seconds or 0.0 for each in both]),
        "mean_error_seconds": sum(times) / len(both),
        "largest_error_seconds": max(times),
        "mean_error_bytes": sum(bytes_) / len(both),
        "largest_error_bytes": max(bytes_),
        "bytes_within_a_tenth": sum(error <= 0.1 for error in bytes_) / len(both),
    }


def ranks(values: Sequence[float]) -> np.ndarray:
    """Returns the rank of each value, the smallest 1; equal ones share the mean of theirs.

    >>> ranks([0.3, 0.1, 0.3])
    array([2.5, 1. , 2.5])
    """
    _, which, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[which]


def rank_correlation(predicted: Sequence[float], found: Sequence[float]) -> float:
    """Returns the correlation of the ranks: 1 where both have the same order, -1 where it is reversed.

    Source: Spearman (1904), The proof and measurement of association between two things.

    Raises:
      JaxparError: If there are fewer than 3 pairs, or one side is the same everywhere.
    """
    if len(predicted) != len(found) or len(found) < 3 or min(np.ptp(predicted), np.ptp(found)) == 0:
        raise refuse(
            f"a rank correlation of {len(predicted)} predictions with {len(found)} values",
            rule="pairs, 3 or more, that are not all the same",
            fix="more layouts: --verify 10",
        )
    return float(np.corrcoef(ranks(predicted), ranks(found))[0, 1])
