"""An ensemble: replicas never synchronize, and evaluation averages their predictions."""

from dataclasses import dataclass

from jaxpar.exchange.base import NO_MODEL, Exchange


@dataclass(frozen=True, kw_only=True)
class Ensemble(Exchange):
    """Models that train in parallel, each on different examples, from the same parameters and with different dropout.

    `evaluate` shows all examples to all of them, and the loss gets the mean of their outputs.

    Attributes:
      name: ensemble (replicas never synchronize; evaluation averages their predictions).
    """

    name: str = "ensemble"
    replicas_differ = True
    averages_predictions = True
    global_model = NO_MODEL
