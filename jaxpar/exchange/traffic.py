"""Traffic between replicas, as collectives of the ledger."""

from dataclasses import dataclass

from jaxpar.mesh.collective import Collective


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """A collective between replicas, and how often it runs.

    Attributes:
      collective: The collective of one step that sends it.
      every: Steps from one such step to the next.
      sync_round: Number of the exchange's sync round that sends it, from 1.
    """

    collective: Collective
    every: int = 1
    sync_round: int = 1
