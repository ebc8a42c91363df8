"""What happens on a virtual clock: gradients of certain versions of the parameters, applied at certain times."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from jaxpar.exchange.clock.delays import Times


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient.

    Attributes:
      worker: Who computed it.
      share: Of which examples: the share-th part of the stream of batches, each of which is as many shares as there
        are workers whose gradients make an update of all.
      read: Which version of each shard of the parameters it was computed from, by number of updates.
    """

    worker: int
    share: int
    read: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """An update of a shard of the parameters, by the mean of some gradients.

    Attributes:
      seconds: When, on the virtual clock.
      pushes: The gradients.
      version: How many updates the shard has had before.
      shard: Of the parameters.
    """

    seconds: float
    pushes: tuple[Push, ...]
    version: int
    shard: int = 0

    @property
    def staleness(self) -> list[int]:
        """How many updates came between the version that each gradient read and this one."""
        return [self.version - push.read[self.shard] for push in self.pushes]


class Simulated(Protocol):
    """A method on the virtual clock.

    Attributes:
      name: What it is called.
      shards: Into how many parts the server divides the parameters.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def shards(self) -> int: ...  # noqa: D102

    def updates(self, workers: int, steps: int, times: Times) -> list[Update]:
        """Returns all updates in the order of their times.

        Args:
          workers: How many.
          steps: Batches whose examples are used up, each of as many shares as there are workers that count.
          times: Of the workers.
        """
        ...

    def shares(self, workers: int) -> int:
        """Returns how many shares a batch has."""
        ...


def mean_staleness(updates: Iterable[Update]) -> float:
    """Returns the mean staleness of all gradients."""
    found = [each for update in updates for each in update.staleness]
    return sum(found) / max(len(found), 1)
