"""Events on a virtual clock: gradients, each computed at a version of the parameters and applied at a time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

from jaxpar.exchange.clock.delays import WorkerTimes


@dataclass(frozen=True, slots=True)
class Push:
    """A gradient that a worker pushes.

    Attributes:
      worker: The worker that computed it.
      share: Index of its examples in the stream of batches; each batch is divided into `SimulatedRun.shares` shares.
      versions: Version of each parameter shard that the worker read: the number of its updates until then.
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
      version: Number of updates of the shard before this one.
      shard: Number of the shard of the parameters.
    """

    seconds: float
    pushes: tuple[Push, ...]
    version: int
    shard: int = 0

    @property
    def staleness(self) -> list[int]:
        """For each gradient, the number of updates since the version that it read."""
        return [self.version - push.versions[self.shard] for push in self.pushes]


class SimulatedRun(Protocol):
    """A training method that is simulated on the virtual clock.

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
          steps: Number of batches, each divided into `shares` shares.
          times: Times of the workers.
        """
        ...

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch."""
        ...


def mean_staleness(updates: Iterable[Update]) -> float:
    """Returns the mean staleness of all gradients."""
    values = [value for update in updates for value in update.staleness]
    return sum(values) / max(len(values), 1)
