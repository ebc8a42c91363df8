"""A parameter server in several shards on a virtual clock, as in DistBelief's Downpour SGD.

Each shard has some of the parameters and counts its own updates. Messages to and from a shard take times of their own,
so that a worker's copy may mix versions, and shards apply gradients in different orders. Workers wait for nobody.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.errors import check_ranges
from jaxpar.exchange.clock.delays import Times
from jaxpar.exchange.clock.events import Push, Update


@dataclass(frozen=True, kw_only=True)
class Downpour:
    """Downpour SGD (Dean et al. 2012), which fetches parameters and pushes a gradient in every step.

    With one shard, and messages that take no time, it is asynchronous SGD. Dean et al. have Adagrad as optimizer; here
    it is the job's, of each shard by itself.

    Attributes:
      shards: Parts of the parameters.
      name: What it is called.
    """

    shards: int = 4
    name: str = "downpour"

    def __post_init__(self):
        check_ranges(self, "", {"shards": (1, 2**16)})

    def shares(self, workers: int) -> int:
        """Returns the workers: each computes a share of a batch."""
        return workers

    def updates(self, workers: int, steps: int, times: Times) -> list[Update]:
        """Returns all updates in the order of their times."""
        begun = self._gradients(workers, steps * workers, times)
        reads = [[0] * self.shards for _ in begun]
        found = []
        for shard in range(self.shards):
            # of what happens at one time a worker's push comes before its next fetch, and one worker after the other
            events = sorted(
                event
                for share, each in enumerate(begun)
                for event in ((each.fetched[shard], each.worker, 1, share), (each.pushed[shard], each.worker, 0, share))
            )
            version = 0
            for seconds, worker, fetches, share in events:
                if fetches:
                    reads[share][shard] = version
                else:
                    found.append((seconds, shard, version, worker, share))
                    version += 1
        return [
            Update(seconds, (Push(worker, share, tuple(reads[share])),), version, shard)
            for seconds, shard, version, worker, share in sorted(found)
        ]

    def _gradients(self, workers: int, total: int, times: Times) -> "list[_Gradient]":
        """Returns so many gradients, in the order in which they are begun: nobody waits for a shard."""
        rngs = [np.random.default_rng((times.seed, worker, 1)) for worker in range(workers)]
        seconds = [times.of(worker) for worker in range(workers)]
        idle, found = [(0.0, worker) for worker in range(workers)], []
        for _ in range(total):
            now, worker = heapq.heappop(idle)
            there, back = times.travel * times.law.draw(rngs[worker], 2 * self.shards).reshape(2, -1)
            done = float((now + there).max()) + next(seconds[worker])
            found.append(_Gradient(worker, (now + there).tolist(), (done + back).tolist()))
            heapq.heappush(idle, (done, worker))
        return found


class _Gradient(NamedTuple):
    """A gradient: when its worker has each shard's parameters, and when each shard has its part."""

    worker: int
    fetched: list[float]
    pushed: list[float]
