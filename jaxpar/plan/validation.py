"""Compares predictions with compiled programs: rank correlation of times, errors of times and bytes."""

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from jaxpar.errors import refuse
from jaxpar.mesh.axes import AXES
from jaxpar.plan.enumeration import select_one
from jaxpar.plan.search import Plan, Question, Ranked, describe, predict
from jaxpar.plan.techniques.table import TECHNIQUES
from jaxpar.units import show_bytes, show_seconds


@dataclass(frozen=True, kw_only=True)
class CompiledLayout:
    """A compiled layout and its prediction.

    Attributes:
      ranked: The layout, as predicted.
      seconds: Seconds of a step, modelled from the compiled program; None if it was refused.
      bytes: Bytes of a device, compiled; None if it was refused.
      fits: Whether the bytes fit the memory.
      refusal: Reason why the layout was not compiled.
      causes: Compiled bytes by cause.
      exposed: Mesh axes to seconds in which computation waits for their collectives, modelled.
      kernels: Predicted seconds of cuDNN's kernels, part of `seconds`: without a GPU they cannot be compiled.
      xla_remat: Share of the FLOP that XLA's own rematerialization repeats to fit the memory.
    """

    ranked: Ranked
    seconds: float | None
    bytes: float | None
    fits: bool = True
    refusal: str = ""
    causes: Mapping[str, float] = field(default_factory=dict)
    exposed: Mapping[str, float] = field(default_factory=dict)
    kernels: float = 0.0
    xla_remat: float = 0.0

    @property
    def errors(self) -> tuple[float, float]:
        """Predicted / compiled - 1, of seconds and of bytes; 0 if the layout was not compiled."""
        if not self.seconds or not self.bytes:
            return 0.0, 0.0
        return self.seconds_without_stragglers / self.seconds - 1, self.ranked.memory.total / self.bytes - 1

    @property
    def seconds_without_stragglers(self) -> float:
        """Predicted seconds without the wait for the slowest device: the replay runs the program of one device."""
        return self.ranked.time.total - self.ranked.time.get("stragglers", 0.0)

    def to_dict(self) -> dict[str, Any]:
        """Returns layout, prediction and compiled values for JSON."""
        return {
            "layout": describe(self.ranked.candidate),
            "refusal": self.refusal,
            "fits": self.fits,
            "predicted": self.ranked.to_dict(),
            "replayed": {"seconds": self.seconds, "kernels": self.kernels, "exposed": dict(self.exposed)},
            "compiled": {"bytes": self.bytes, "squeezed": self.xla_remat} | dict(self.causes),
        }

    def __str__(self) -> str:
        predicted = f"{show_seconds(self.seconds_without_stragglers)}, {show_bytes(self.ranked.memory.total)}"
        line = f"{describe(self.ranked.candidate)}: {predicted}; "
        if not self.seconds or not self.bytes:
            return line + self.refusal
        time, memory = self.errors
        line += f"{show_seconds(self.seconds)} ({time:+.0%}), {show_bytes(self.bytes)} ({memory:+.0%})"
        line += f", {show_seconds(self.kernels)} of it cuDNN's attention, as predicted" * (self.kernels > 0)
        line += f", {self.xla_remat:.0%} of its FLOP repeated by XLA to save memory" * (self.xla_remat >= 0.005)
        return line + ", DOES NOT FIT" * (not self.fits)


def proposal(plan: Plan, checked: Sequence[CompiledLayout] = ()) -> Ranked:
    """Returns the first layout of a plan; if some were compiled, the first compiled one that fits.

    Raises:
      JaxparError: If no compiled layout fits.
    """
    if not checked:
        return plan.best[0]
    for layout in checked:
        if layout.fits:
            return layout.ranked
    if not any(layout.bytes for layout in checked):
        raise refuse(
            f"none of the {len(checked)} layouts that were compiled is one that jaxpar runs: {checked[0].refusal}",
            rule="a plan proposes layouts that compose, and whose compiled program fits",
            fix=f"--verify {2 * len(checked)}, or another number of devices",
        )
    leanest = min((layout.bytes for layout in checked if layout.bytes), default=0.0)
    raise refuse(
        f"none of the {len(checked)} layouts that were compiled fits {show_bytes(plan.question.memory_limit)}"
        + (f"; the leanest needs {show_bytes(leanest)}" if leanest else ""),
        rule="a plan proposes layouts whose compiled program fits",
        fix=f"--memory {show_bytes(int(0.8 * plan.question.memory_limit)).replace(' ', '')}, which leaves the "
        f"plan more room",
    )


def comparison(checked: Sequence[CompiledLayout]) -> str:
    """Returns predicted and compiled values as lines of text."""
    lines = ["predicted (modelled) beside compiled (bytes) and replayed (seconds, modelled from the compiled program):"]
    lines += [f"  {layout}" for layout in checked]
    if statistics := agreement(checked):
        lines.append(summary(statistics))
    return "\n".join(lines)


def summary(statistics: Mapping[str, float]) -> str:
    """Returns the result of `agreement` as a line of text."""
    if not statistics:
        return "fewer than 3 layouts: nothing to rank"
    return (
        f"{statistics['layouts']} layouts: rank correlation of seconds {statistics['rank_correlation']:.3f} "
        f"(Spearman), mean "
        f"error {statistics['mean_error_seconds']:.1%}, largest {statistics['largest_error_seconds']:.1%}; "
        f"bytes: mean error "
        f"{statistics['mean_error_bytes']:.1%}, largest {statistics['largest_error_bytes']:.1%}, "
        f"within 10 % {statistics['bytes_within_a_tenth']:.0%}"
    )


def agreement(checked: Sequence[CompiledLayout]) -> dict[str, float]:
    """Returns rank correlation and errors of predictions against compiled programs; {} for fewer than 3 layouts.

    Both times are modelled: compiled programs are replayed, not measured.
    """
    compiled = [item for item in checked if item.seconds]
    if len(compiled) < 3:
        return {}
    times, bytes_ = ([abs(item.errors[i]) for item in compiled] for i in (0, 1))
    return {
        "layouts": len(compiled),
        "rank_correlation": rank_correlation(
            [item.seconds_without_stragglers for item in compiled], [item.seconds or 0.0 for item in compiled]
        ),
        "mean_error_seconds": sum(times) / len(compiled),
        "largest_error_seconds": max(times),
        "mean_error_bytes": sum(bytes_) / len(compiled),
        "largest_error_bytes": max(bytes_),
        "bytes_within_a_tenth": sum(error <= 0.1 for error in bytes_) / len(compiled),
    }


def ranks(values: Sequence[float]) -> np.ndarray:
    """Returns the rank of each value, from 1 for the smallest; equal values share their mean rank.

    >>> ranks([0.3, 0.1, 0.3])
    array([2.5, 1. , 2.5])
    """
    _, indices, counts = np.unique(values, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2)[indices]


def rank_correlation(predicted: Sequence[float], observed: Sequence[float]) -> float:
    """Returns the correlation of the ranks: 1 for the same order, -1 for the reversed order.

    Source: Spearman (1904), The proof and measurement of association between two things.

    Raises:
      JaxparError: If there are fewer than 3 pairs, or all values of one side are equal.
    """
    if len(predicted) != len(observed) or len(observed) < 3 or min(np.ptp(predicted), np.ptp(observed)) == 0:
        raise refuse(
            f"a rank correlation of {len(predicted)} predictions with {len(observed)} values",
            rule="pairs, 3 or more, that are not all the same",
            fix="more layouts: --verify 10",
        )
    return float(np.corrcoef(ranks(predicted), ranks(observed))[0, 1])


# Random layouts, equally many of every kind: tests predictions also on layouts that the planner would not choose.

# largest axis that splits a model, most microbatches: more are legal, but nobody would run them
MOST, MICROBATCHES = 16, 64
ROOM = 1.5  # times a device's memory: layouts that do not fit are compiled too


def sample(question: Question, count: int, *, seed: int = 0) -> list[Ranked]:
    """Draws random layouts, independently of their predictions, and predicts them.

    Draws one layout of each kind in turn; a kind is the set of axes that split the model, and the ZeRO stage.

    Args:
      question: Model, devices, batch, hardware.
      count: Number of layouts.
      seed: Random seed.

    Raises:
      JaxparError: If there are fewer legal layouts.
    """
    candidates = question.legal()
    usual = question.bytes(candidates).total < ROOM * question.memory_limit
    usual &= candidates.microbatches <= MICROBATCHES
    splitting = [axis for axis, entry in AXES.items() if entry.splits and axis in TECHNIQUES]
    for axis in splitting:
        usual &= candidates.size(axis) <= MOST
    possible = int(usual.sum())
    if not 1 <= count <= possible:
        raise refuse(f"{count} layouts of {possible}", rule="at least one, and no more than there are", fix="30")
    kinds = defaultdict(list)
    # permutes all candidates: the draw does not change with the formulas
    for i in np.random.default_rng(seed).permutation(len(usual)).tolist():
        if usual[i]:
            split_axes = (bool(candidates.sizes[axis][i] > 1) for axis in splitting)
            kinds[*split_axes, int(candidates.zero[i])].append(i)
    longest = max(len(entry) for entry in kinds.values())
    chosen_indices = [kinds[kind][rank] for rank in range(longest) for kind in sorted(kinds) if rank < len(kinds[kind])]
    return [predict(question, select_one(candidates, i)) for i in chosen_indices[:count]]
