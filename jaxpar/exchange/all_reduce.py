"""The default: gradients are summed over the replicas in every step, so the replicas stay equal.

XLA inserts the collective, as for any axis that splits examples: see `jaxpar.step.unpipelined`.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from jaxpar.exchange.base import Exchange
from jaxpar.exchange.traffic import Traffic


@dataclass(frozen=True, kw_only=True)
class AllReduce(Exchange):
    """All-reduce of gradients in every step.

    Attributes:
      name: How replicas over `data` synchronize: all_reduce (gradients are summed in every step).
    """

    name: str = "all_reduce"
    per_replica = False

    def traffic(self, shards: Mapping[str, Any], replicas: int) -> tuple[Traffic, ...]:
        """Returns one all-reduce per parameter, of the gradient of the shard that a device stores.

        With `fsdp`, XLA sums small gradients, such as those of biases, unsharded over both axes at once.
        """
        from jaxpar.exchange.replica_mesh import mean_traffic

        return mean_traffic(shards, replicas)
