"""Two noise scales: the temperature of updates, computed from settings, and the measured noise scale of gradients.

    temperature     eps / (1 - m) (N / B - 1)                  Smith and Le
    scale           B_simple = tr(Sigma) / |G|^2, in examples  McCandlish et al.

The temperature measures the random motion of the updates: while B << N, dividing the rate by k reduces it as much as
multiplying the batch by k. B_simple is the batch size up to which more examples per step pay off: with batches of
B_simple, reaching a loss takes twice the minimum number of steps and twice the minimum number of examples.
"""

import math
from dataclasses import dataclass

SMOOTHING = 0.9  # weight of the running average; applied to the paper's numerator and denominator separately


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
