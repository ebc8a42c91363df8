"""The default: gradients are summed over the replicas in every step, so that these stay equal.

XLA makes the collective, like those of any axis that sees other examples: see `jaxpar.step.whole`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.exchange.base import Exchange
from jaxpar.exchange.sent import Sent


@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange):
    """All-reduce of gradients in every step.

    Attributes:
      name: How replicas over `data` agree: all_reduce (gradients are summed in every step).
    """

    name: str = "all_reduce"
    apart = False

    def sends(self, shards: Mapping[str, Any], replicas: int) -> tuple[Sent, ...]:
        """Returns an all-reduce of every gradient, of the part that a device stores of its parameter.

        With `fsdp` XLA sums small ones, such as biases, whole over both axes at once.
        """
        from jaxpar.exchange.between import averaged

        return averaged(shards, replicas)
