"""Measures the noise of gradients and updates every `noise_every` steps, for the rows and a suggested batch size.

    state, batch ─► norms of the gradients of batch parts ┐
                    └► the step ─► grad_norm ─────────────┴► estimates ─► smoothed ─► row, suggested batch

The compiled step does not change, so losses are equal bit for bit with and without measurements. Two noise scales: the
temperature of updates, computed from settings, and the measured noise scale of gradients.

    temperature     eps / (1 - m) (N / B - 1)                  Smith and Le
    scale           B_simple = tr(Sigma) / |G|^2, in examples  McCandlish et al.

The temperature measures the random motion of the updates: while B << N, dividing the rate by k reduces it as much as
multiplying the batch by k. B_simple is the batch size up to which more examples per step pay off: with batches of
B_simple, reaching a loss takes twice the minimum number of steps and twice the minimum number of examples.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

SMOOTHING = 0.9  # weight of the running average; applied to the paper's numerator and denominator separately
SMALL = "part_grad_norm"  # metric of a measured step; see `Step.part_norm`


def temperature(rate: float, *, momentum: float, examples: int, batch: int) -> float:
    """The temperature of SGD, in units of the learning rate; 0 if a batch contains all examples.

    Args:
      rate: The learning rate eps of the step.
      momentum: Share m of the previous update that is added to the next one; 0 for optimizers that average gradients.
      examples: Number N of training examples.
      batch: Number B of examples per step.

    Source: Smith, Le (2018), arXiv:1710.06451, g = eps (N/B - 1); with momentum Smith, Kindermans, Ying, Le (2018),
    arXiv:1711.00489. Both derive it for SGD: for Adam and similar optimizers it only compares runs of the same
    optimizer.
    """
    return rate / (1 - momentum) * max(0.0, examples / batch - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientNoise:
    """Estimates of the norm of the true gradient, and of the variance of the examples' gradients around it.

    Attributes:
      signal: |G|^2, the squared norm of the true gradient; its estimate may be negative.
      trace: tr(Sigma), the sum of the variances of one example's gradient; its estimate may be negative.
    """

    signal: float
    trace: float

    @property
    def scale(self) -> float:
        """B_simple, in examples; inf if the gradient is indistinguishable from noise."""
        if self.trace <= 0:
            return 0.0
        return self.trace / self.signal if self.signal > 0 else math.inf

    @property
    def is_finite(self) -> bool:
        """Whether both estimates are finite."""
        return math.isfinite(self.signal) and math.isfinite(self.trace)

    def smoothed_with(self, previous: "GradientNoise | None") -> "GradientNoise":
        """Averages both estimates with earlier ones; the ratio of averages is less biased than an average of ratios."""
        if previous is None:
            return self
        old, new = SMOOTHING, 1 - SMOOTHING
        return GradientNoise(
            signal=old * previous.signal + new * self.signal, trace=old * previous.trace + new * self.trace
        )


def estimate(small: float, big: float, *, batch: int, parts: int) -> GradientNoise:
    """Unbiased estimates from one batch.

    Args:
      small: Root mean square of the gradient norms of the batch's parts.
      big: Gradient norm of the whole batch.
      batch: Examples in the batch.
      parts: Number of equal parts, at least 2.

    Source: McCandlish, Kaplan, Amodei, OpenAI Dota Team (2018), arXiv:1812.06162, appendix A.1.
    """
    part = batch / parts
    return GradientNoise(
        signal=(batch * big**2 - part * small**2) / (batch - part),
        trace=(small**2 - big**2) / (1 / part - 1 / batch),
    )


class Noise:
    """The smoothed noise estimates of a run.

    Args:
      every: Steps between two measurements; 0 measures none.
      momentum: The optimizer's momentum; see `jaxpar.train.noise.temperature`.
      examples: Number of training examples, or None if unknown.
    """

    def __init__(self, every: int = 0, *, momentum: float = 0.0, examples: int | None = None):
        self.every, self.momentum, self.examples = every, momentum, examples
        self.smoothed: GradientNoise | None = None

    def resume(self, row: Mapping[str, Any]) -> None:
        """Restores the estimates from the row of the last measurement; resets them if the row has none."""
        known = row.get("noise_signal") is not None and row.get("noise_trace") is not None
        self.smoothed = GradientNoise(signal=row["noise_signal"], trace=row["noise_trace"]) if known else None

    def is_due(self, step: int) -> bool:
        """Returns whether the noise is measured at a step, from 1."""
        return self.every > 0 and step % self.every == 0

    def row(self, values: Mapping[str, float], *, rate: float | None, batch: int, parts: int) -> dict[str, float]:
        """Returns the noise entries of the row of a measured step.

        Args:
          values: The step's metrics.
          rate: Its learning rate, or None if unknown.
          batch: Examples of its batch.
          parts: Number of parts into which the batch was split.
        """
        found = estimate(values[SMALL], values["grad_norm"], batch=batch, parts=parts)
        if found.is_finite:
            self.smoothed = found.smoothed_with(self.smoothed)
        said: dict[str, float] = {}
        if self.smoothed is not None:
            said = {
                "noise_signal": self.smoothed.signal,
                "noise_trace": self.smoothed.trace,
                "noise_scale": self.smoothed.scale,
            }
        if rate is not None and self.examples:
            said["noise_temperature"] = temperature(rate, momentum=self.momentum, examples=self.examples, batch=batch)
        return said

    def suggest_batch(self, ways: int) -> int | None:
        """Returns the multiple of `ways` nearest to the gradient noise scale; None if that is unknown or infinite."""
        if self.smoothed is None or not math.isfinite(self.smoothed.scale):
            return None
        return max(1, round(self.smoothed.scale / ways)) * ways

    def describe(self, batch: int, ways: int) -> str:
        """Returns a message with the suggested batch size; "" if nothing was measured.

        Args:
          batch: Examples per step.
          ways: The batch size must be a multiple of this number.
        """
        if self.smoothed is None:
            return ""
        suggested = self.suggest_batch(ways)
        if suggested is None:
            return (
                f"gradient noise scale: more than these batches of {batch} examples tell, for no gradient stands out "
                f"of the noise; suggested train.global_batch: a larger one"
            )
        return (
            f"gradient noise scale {self.smoothed.scale:.4g} examples; suggested train.global_batch = {suggested} "
            f"(it is {batch}): twice the fewest steps, and twice the fewest examples"
        )
