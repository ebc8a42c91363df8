"""Measures the noise of gradients and updates every `noise_every` steps, for the rows and a suggested batch size.

    state, batch ─► norms of the gradients of batch parts ┐
                    └► the step ─► grad_norm ─────────────┴► estimates ─► smoothed ─► row, suggested batch

The compiled step does not change, so losses are equal bit for bit with and without measurements.
"""

import math
from collections.abc import Mapping
from typing import Any

from jaxpar.optim.noise import GradientNoise, estimate, temperature

SMALL = "part_grad_norm"  # metric of a measured step; see `Step.part_norm`


class Noise:
    """The smoothed noise estimates of a run.

    Args:
      every: Steps between two measurements; 0 measures none.
      momentum: The optimizer's momentum; see `jaxpar.optim.noise.temperature`.
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
