"""The noise of a run's gradients and updates: measured every so many steps, said in its rows and at its end.

    state, batch ─► norms of parts' gradients ┐
                    └► the step ─► grad_norm ─┴► estimates ─► smoothed ─► row, suggested batch

The program that trains is not changed, so its losses are the same bits with and without.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxpar.optim.noise import GradientNoise, estimate, temperature

SMALL = "part_grad_norm"  # the metric of a step that is measured; see `Step.part_norm`


class Noise:
    """The noise of a run, as far as it is measured.

    Args:
      every: Steps from one measurement to the next; 0 for none.
      momentum: Of the optimizer; see `jaxpar.optim.noise.temperature`.
      examples: To train on, or None where nobody knows.
    """

    def __init__(self, every: int = 0, *, momentum: float = 0.0, examples: int | None = None):
        self.every, self.momentum, self.examples = every, momentum, examples
        self.smoothed: GradientNoise | None = None

    def resume(self, row: Mapping[str, Any]) -> None:
        """Goes on from the row of the last measurement, or from none."""
        known = row.get("noise_signal") is not None and row.get("noise_trace") is not None
        self.smoothed = GradientNoise(signal=row["noise_signal"], trace=row["noise_trace"]) if known else None

    def is_due(self, step: int) -> bool:
        """Returns whether a step, from 1, is measured."""
        return self.every > 0 and step % self.every == 0

    def row(self, values: Mapping[str, float], *, rate: float | None, batch: int, parts: int) -> dict[str, float]:
        """Returns the noise entries of the row of a measured step.

        Args:
          values: The step's metrics.
          rate: Its learning rate, or None if that is not known.
          batch: Its examples.
          parts: Into how many parts they fell.
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

    def suggested(self, ways: int) -> int | None:
        """Returns the multiple of `ways` nearest to the noise scale of gradients; None where that is unknown."""
        if self.smoothed is None or not math.isfinite(self.smoothed.scale):
            return None
        return max(1, round(self.smoothed.scale / ways)) * ways

    def describe(self, batch: int, ways: int) -> str:
        """Returns the batch that follows from the noise, in words; "" where nothing was measured.

        Args:
          batch: Examples per step.
          ways: What the batch of this job is a multiple of.
        """
        if self.smoothed is None:
            return ""
        suggested = self.suggested(ways)
        if suggested is None:
            return (
                f"gradient noise scale: more than these batches of {batch} examples tell, for no gradient stands out "
                f"of the noise; suggested train.global_batch: a larger one"
            )
        return (
            f"gradient noise scale {self.smoothed.scale:.4g} examples; suggested train.global_batch = {suggested} "
            f"(it is {batch}): twice the fewest steps, and twice the fewest examples"
        )
