"""Two noise scales, which are not one: of the updates, by settings alone; and of the gradients, measured.

    temperature     eps / (1 - m) (N / B - 1)                  Smith and Le
    scale           B_simple = tr(Sigma) / |G|^2, in examples  McCandlish et al.

The first says how far a step of a rate strays at random: rate down or batch up by k, it falls alike while B << N. The
second says up to which batch more examples are worth their while: with B_simple, a loss takes twice the fewest steps
and twice the fewest examples that it can take.
"""

import math
from dataclasses import dataclass

SMOOTHING = 0.9  # share of what was measured before; of the paper's numerator and denominator, each for itself


def temperature(rate: float, *, momentum: float, examples: int, batch: int) -> float:
    """Returns the temperature of SGD, in units of the learning rate; 0 where a batch is all examples.

    Args:
      rate: The learning rate of the step, eps.
      momentum: Share of the update before that is added to the next one, m; 0 for optimizers that average gradients.
      examples: To train on, N.
      batch: Examples per step, B.

    Source: Smith, Le (2018), arXiv:1710.06451, g = eps (N/B - 1); with momentum Smith, Kindermans, Ying, Le (2018),
    arXiv:1711.00489. Both derive it for SGD: of Adam and its kin it compares runs of one optimizer, and no more.
    """
    return rate / (1 - momentum) * max(0.0, examples / batch - 1)


@dataclass(frozen=True, kw_only=True, slots=True)
class GradientNoise:
    """Estimates of the mean of gradients and of how examples differ from it.

    Attributes:
      signal: |G|^2, the square of the norm of the true gradient. An estimate may be negative.
      trace: tr(Sigma), the sum of the variances of one example's gradient. Likewise.
    """

    signal: float
    trace: float

    @property
    def scale(self) -> float:
        """B_simple in examples; inf where no gradient can be told from noise."""
        if self.trace <= 0:
            return 0.0
        return self.trace / self.signal if self.signal > 0 else math.inf

    @property
    def is_finite(self) -> bool:
        """Whether both are numbers."""
        return math.isfinite(self.signal) and math.isfinite(self.trace)

    def after(self, before: "GradientNoise | None") -> "GradientNoise":
        """Returns it smoothed with what was before: a mean of ratios would be biased, the ratio of means is less so."""
        if before is None:
            return self
        old, new = SMOOTHING, 1 - SMOOTHING
        return GradientNoise(
            signal=old * before.signal + new * self.signal, trace=old * before.trace + new * self.trace
        )


def estimate(small: float, big: float, *, batch: int, parts: int) -> GradientNoise:
    """Returns unbiased estimates, of one batch.

    Args:
      small: Root mean square of the norms of the gradients of its parts.
      big: Norm of the gradient of the whole.
      batch: Examples of the whole.
      parts: Into how many equal ones it falls, at least 2.

    Source: McCandlish, Kaplan, Amodei, OpenAI Dota Team (2018), arXiv:1812.06162, appendix A.1.
    """
    part = batch / parts
    return GradientNoise(
        signal=(batch * big**2 - part * small**2) / (batch - part),
        trace=(small**2 - big**2) / (1 / part - 1 / batch),
    )
