"""A parameter server in several shards on a virtual clock, as in DistBelief's Downpour SGD.

Each shard has some of the parameters and counts its own updates. Messages to and from different shards take different
times, so a worker's copy may mix versions, and shards apply gradients in different orders. Workers never wait.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.errors import check_ranges
from jaxpar.exchange.clock.delays import WorkerTimes
from jaxpar.exchange.clock.events import Push, Update


@dataclass(frozen=True, kw_only=True)
class Downpour:
    """Downpour SGD (Dean et al. 2012), which fetches parameters and pushes a gradient in every step.

    With one shard and messages that take no time, it is asynchronous SGD. Dean et al. use Adagrad; here each shard has
    a state of the job's optimizer.

    Attributes:
      shards: Number of parts of the parameters.
      name: Name of the method.
    """

    shards: int = 4
    name: str = "downpour"

    def __post_init__(self):
        check_ranges(self, "", {"shards": (1, 2**16)})

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch: one per worker."""
        return workers

    def updates(self, workers: int, steps: int, times: WorkerTimes) -> list[Update]:
        """Returns all updates in the order of their times."""
        begun = self._gradients(workers, steps * workers, times)
        reads = [[0] * self.shards for _ in begun]
        applied = []
        for shard in range(self.shards):
            # at equal times the order is by worker, and a worker's push comes before its next fetch
            events = sorted(
                event
                for share, grad in enumerate(begun)
                for event in ((grad.fetched[shard], grad.worker, 1, share), (grad.pushed[shard], grad.worker, 0, share))
            )
            version = 0
            for seconds, worker, fetches, share in events:
                if fetches:
                    reads[share][shard] = version
                else:
                    applied.append((seconds, shard, version, worker, share))
                    version += 1
        return [
            Update(seconds, (Push(worker, share, tuple(reads[share])),), version, shard)
            for seconds, shard, version, worker, share in sorted(applied)
        ]

    def _gradients(self, workers: int, total: int, times: WorkerTimes) -> "list[_Gradient]":
        """Returns `total` gradients, in the order in which they begin."""
        rngs = [np.random.default_rng((times.seed, worker, 1)) for worker in range(workers)]
        seconds = [times.stream(worker) for worker in range(workers)]
        idle, gradients = [(0.0, worker) for worker in range(workers)], []
        for _ in range(total):
            clock, worker = heapq.heappop(idle)
            fetches, pushes = times.travel * times.law.draw(rngs[worker], 2 * self.shards).reshape(2, -1)
            computed = float((clock + fetches).max()) + next(seconds[worker])
            gradients.append(_Gradient(worker, (clock + fetches).tolist(), (computed + pushes).tolist()))
            heapq.heappush(idle, (computed, worker))
        return gradients


class _Gradient(NamedTuple):
    """A gradient: for each shard, the times at which its parameters reach the worker and the gradient the shard."""

    worker: int
    fetched: list[float]
    pushed: list[float]
