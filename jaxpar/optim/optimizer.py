"""The settings of a job's optimizer; `chain` makes an optax chain of them."""

import math
from dataclasses import dataclass, replace
from typing import Literal

from jaxpar.errors import check_ranges, refuse
from jaxpar.optim.growth import check_phases

SWEPT = ("learning_rate", "final", "weight_decay", "beta1", "beta2", "clip")  # settings that may be arrays


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, and its settings.

    Attributes:
      name: adamw, adam, sgd, lion, lamb, lars, adafactor or muon, from optax.
      learning_rate: The highest.
      warmup: Steps over which the learning rate rises from 0 to the highest.
      decay: How it falls after that: constant, cosine or linear.
      final: Share of the highest learning rate at the last step.
      drops: [[step, factor], ...]: after so many steps the rate is divided by the factor, besides its decay. What
        train.grow does to the temperature of updates, more slowly.
      weight_decay: Of matrices; vectors (biases, norms) are not decayed.
      beta1: Decay of the mean of gradients; the momentum of sgd and lars.
      beta2: Decay of the mean of squares.
      clip: Largest global norm of the gradients; 0 does not clip.
      reference_batch: Examples per step for which learning_rate, warmup and drops were found: with another global
        batch the rate follows `scaling`, and warm-up and drops come after as many examples. 0 takes them as they are.
        A batch that grows by train.grow leaves the rate of its first phase.
      scaling: How the rate follows the global batch, given reference_batch: linear (Goyal et al. 2017), or sqrt (You et
        al. 2019, with lamb).
    """

    name: Literal["adamw", "adam", "sgd", "lion", "lamb", "lars", "adafactor", "muon"] = "adamw"
    learning_rate: float = 1e-3
    warmup: int = 0
    decay: Literal["constant", "cosine", "linear"] = "cosine"
    final: float = 0.1
    drops: tuple[tuple[int, float], ...] = ()
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0
    reference_batch: int = 0
    scaling: Literal["linear", "sqrt"] = "linear"

    def __post_init__(self):
        most = 3.4e38  # float32
        check_ranges(
            self,
            "optimizer",
            {
                "learning_rate": (0, most),
                "warmup": (0, 2**31 - 1),
                "final": (0, 1),
                "weight_decay": (0, most),
                "clip": (0, most),
                "beta1": (0, 1),
                "beta2": (0, 1),
                "reference_batch": (0, 2**31 - 1),
            },
            below=("beta1", "beta2"),
        )
        check_phases(self.drops, "optimizer.drops")
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise refuse(
                f"optimizer.weight_decay = {self.weight_decay} with {self.name}",
                rule=f"{self.name} does not decay weights",
                fix='name = "adamw", or leave weight_decay out',
            )

    @property
    def momentum(self) -> float:
        """Share of the update before that is added to the next one; 0 of optimizers that average gradients."""
        return self.beta1 if self.name in ("sgd", "lars") else 0.0

    def at(self, batch: int) -> "Optimizer":
        """Returns the settings for a global batch: their rate and warm-up hold as they are.

        Args:
          batch: Examples per step, over all devices and microbatches: how a mesh divides them changes nothing.
        """
        if not self.reference_batch:
            return self
        times = batch / self.reference_batch
        rate = self.learning_rate * (times if self.scaling == "linear" else math.sqrt(times))
        steps = -(-self.warmup * self.reference_batch // batch)
        drops = tuple((-(-step * self.reference_batch // batch), factor) for step, factor in self.drops)
        return replace(self, learning_rate=rate, warmup=steps, drops=drops, reference_batch=0)

    def said_at(self, batch: int) -> str:
        """Returns how the rate follows the global batch; "" where it does not."""
        if not self.reference_batch:
            return ""
        here = self.at(batch)
        rises = f", reached after {here.warmup} steps" if here.warmup else ""
        return (
            f"learning rate {here.learning_rate:.4g} for {batch} examples per step{rises}: "
            f"{self.learning_rate:.4g} for {self.reference_batch}, {self.scaling} in the batch"
        )
