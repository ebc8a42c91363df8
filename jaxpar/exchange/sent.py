"""Traffic between replicas, in the noun that the ledger has for it."""

from dataclasses import dataclass

from jaxpar.mesh.collective import Collective


@dataclass(frozen=True, kw_only=True)
class Sent:
    """A collective that replicas run, and how often.

    Attributes:
      collective: As the ledger has it, in a step that sends it.
      every: Steps from one such step to the next.
      meeting: At which of the exchange's meetings, from 1.
    """

    collective: Collective
    every: int = 1
    meeting: int = 1
