"""An ensemble: replicas never meet, and what they predict is averaged where they are evaluated."""

from dataclasses import dataclass

from jaxpar.exchange.base import NO_MODEL, Exchange


@dataclass(frozen=True, kw_only=True)
class Ensemble(Exchange):
    """Models that train side by side, each on examples of its own, from the same parameters and with other dropout.

    `evaluate` shows all examples to all of them, and the loss gets the mean of what they return.

    Attributes:
      name: ensemble (replicas never meet; evaluation averages what they predict).
    """

    name: str = "ensemble"
    differ = True
    averages_predictions = True
    global_model = NO_MODEL
