"""The settings of a job's optimizer; `chain` makes an optax chain of them."""

from dataclasses import dataclass
from typing import Literal

from jaxpar.errors import check_ranges, refuse


@dataclass(frozen=True, kw_only=True)
class Optimizer:
    """The optimizer, and its settings.

    Attributes:
      name: adamw, adam, sgd, lion, lamb, lars, adafactor or muon, from optax.
      learning_rate: The highest.
      warmup: Steps over which the learning rate rises from 0 to the highest.
      decay: How it falls after that: constant, cosine or linear.
      final: Share of the highest learning rate at the last step.
      weight_decay: Of matrices; vectors (biases, norms) are not decayed.
      beta1: Decay of the mean of gradients; the momentum of sgd and lars.
      beta2: Decay of the mean of squares.
      clip: Largest global norm of the gradients; 0 does not clip.
    """

    name: Literal["adamw", "adam", "sgd", "lion", "lamb", "lars", "adafactor", "muon"] = "adamw"
    learning_rate: float = 1e-3
    warmup: int = 0
    decay: Literal["constant", "cosine", "linear"] = "cosine"
    final: float = 0.1
    weight_decay: float = 0.0
    beta1: float = 0.9
    beta2: float = 0.95
    clip: float = 1.0

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
            },
            below=("beta1", "beta2"),
        )
        if self.weight_decay and self.name in ("adam", "sgd"):
            raise refuse(
                f"optimizer.weight_decay = {self.weight_decay} with {self.name}",
                rule=f"{self.name} does not decay weights",
                fix='name = "adamw", or leave weight_decay out',
            )
