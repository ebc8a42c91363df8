"""The optimizer of a job: an optax chain and its learning rate, from a handful of settings."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import jax
import optax

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


def schedule(spec: Optimizer, steps: int) -> Callable:
    """Returns the learning rate as a function of the step, over a run of `steps`."""
    rest = max(1, steps - spec.warmup)
    falling = {
        "constant": lambda: optax.constant_schedule(spec.learning_rate),
        "cosine": lambda: optax.cosine_decay_schedule(spec.learning_rate, rest, alpha=spec.final),
        "linear": lambda: optax.linear_schedule(spec.learning_rate, spec.final * spec.learning_rate, rest),
    }[spec.decay]()
    rising = optax.linear_schedule(0.0, spec.learning_rate, spec.warmup)
    return optax.join_schedules([rising, falling], [spec.warmup]) if spec.warmup else falling


def build(spec: Optimizer, steps: int) -> optax.GradientTransformation:
    """Returns the optax chain: clipping by global norm, then the optimizer with its schedule."""
    rate = schedule(spec, steps)
    made = {
        "adamw": lambda: optax.adamw(rate, spec.beta1, spec.beta2, weight_decay=spec.weight_decay, mask=_matrices),
        "adam": lambda: optax.adam(rate, spec.beta1, spec.beta2),
        "sgd": lambda: optax.sgd(rate, spec.beta1 or None),
        "lion": lambda: optax.lion(rate, spec.beta1, spec.beta2, weight_decay=spec.weight_decay, mask=_matrices),
        "lamb": lambda: optax.lamb(rate, spec.beta1, spec.beta2, weight_decay=spec.weight_decay, mask=_matrices),
        "lars": lambda: optax.lars(rate, spec.weight_decay, weight_decay_mask=_matrices, momentum=spec.beta1),
        "adafactor": lambda: optax.adafactor(rate, weight_decay_rate=spec.weight_decay or None),
        "muon": lambda: optax.contrib.muon(rate, weight_decay=spec.weight_decay),
    }[spec.name]()
    return optax.chain(optax.clip_by_global_norm(spec.clip), made) if spec.clip else made


def _matrices(params):
    return jax.tree.map(lambda leaf: leaf.ndim > 1, params)
