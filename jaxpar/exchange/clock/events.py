"""Events on a virtual clock: gradients at some version of the parameters, applied at some time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from jaxpar.exchange.clock.delays import WorkerTimes


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient.

    Attributes:
      worker: The worker that computed it.
      share: Its examples: the share-th part of the stream of batches; a batch has a share for each worker that counts.
      versions: The version of each shard of the parameters that it was computed from, by number of updates.
    """

    worker: int
    share: int
    versions: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Update:
    """An update of a shard of the parameters, by the mean of some gradients.

    Attributes:
      seconds: Time on the virtual clock.
      pushes: The gradients.
      version: Updates of the shard before this one.
      shard: Of the parameters.
    """

    seconds: float
    pushes: tuple[Push, ...]
    version: int
    shard: int = 0

    @property
    def staleness(self) -> list[int]:
        """The number of updates between the version that each gradient read and this one."""
        return [self.version - push.versions[self.shard] for push in self.pushes]


class SimulatedRun(Protocol):
    """A method on the virtual clock.

    Attributes:
      name: Name of the method.
      shards: Number of parts into which the server divides the parameters.
    """

    @property
    def name(self) -> str: ...  # noqa: D102

    @property
    def shards(self) -> int: ...  # noqa: D102

    def updates(self, workers: int, steps: int, times: WorkerTimes) -> list[Update]:
        """Returns all updates in the order of their times.

        Args:
          workers: Number of workers.
          steps: Batches used up, each of as many shares as there are workers that count.
          times: Of the workers.
        """
        ...

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch."""
        ...


def mean_staleness(updates: Iterable[Update]) -> float:
    """Returns the mean staleness of all gradients."""
    values = [value for update in updates for value in update.staleness]
    return sum(values) / max(len(values), 1)
