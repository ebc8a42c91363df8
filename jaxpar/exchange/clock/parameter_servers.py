"""Parameter servers on a virtual clock: one in shards, one in two levels, and the center of elastic averaging.

Shards, as in DistBelief's Downpour SGD: each has some of the parameters and counts its own updates. Messages to and
from different shards take different times, so a worker's copy may mix versions, and shards apply gradients in
different orders. Workers never wait.

Two levels: groups of workers have servers, and these have a root.

    root      v0 ───► v1 ────────► v2                 an update is one server's mean
    servers    └ mean of m ┘└ mean of m ┘             a server waits for its m workers, and for no other server
    workers      m per server

With N workers under g servers and w bytes of parameters, these bytes are sent when each worker makes a step:

                  g = N, without servers     g servers of m = N / g     and the mean staleness is
    root          2 N w                      2 g w                      g - 1 updates, instead of N - 1
    server                                   2 (m + 1) w
    worker        2 w                        2 w

Half of these bytes are parameters sent down, half are gradients sent up.

Elastic averaging: workers train their own copies, and one by one meet a center.

    worker 0   meet ─ step ─ step ─ meet ─ step ─ step ─ meet         every = 2
    worker 1   meet ── step ──── step ── meet ── step ── ...
    center       └ moves at each meeting, in the order in which workers come

At a meeting, a worker's parameters and the center move towards each other. No worker waits for another. A worker's
staleness is the number of times that the center has moved since the worker's last meeting.
"""

import heapq
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from jaxpar.errors import check_ranges, nearest_divisor, refuse
from jaxpar.exchange.base import STEPS
from jaxpar.exchange.clock.base import Push, Update, WorkerTimes


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


@dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """Synchronous under each server, asynchronous between them (Gupta, Zhang, Wang 2016, arXiv:1509.04210).

    With one server it is synchronous SGD; with one server per worker it is asynchronous SGD with messages over two
    links. In Gupta et al. the servers of a tree forward partial sums; here a server waits for all its workers.

    Attributes:
      servers: Number of servers below the root; it divides the number of workers.
      name: Name of the method.
    """

    servers: int = 2
    name: str = "servers"
    shards = 1

    def __post_init__(self):
        check_ranges(self, "", {"servers": (1, 2**16)})

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch: one per worker.

        Raises:
          JaxparError: If the number of servers does not divide the number of workers.
        """
        if workers % self.servers:
            raise refuse(
                f"{self.servers} servers of {workers} workers",
                rule="servers have equally many workers",
                fix=f"servers:{nearest_divisor(workers, self.servers) or 1}",
            )
        return workers

    def updates(self, workers: int, steps: int, times: WorkerTimes) -> list[Update]:
        """Returns all updates in the order of their times."""
        per_server = self.shares(workers) // self.servers
        seconds = [times.stream(worker) for worker in range(workers)]
        flying: list[tuple[float, int, tuple[Push, ...]]] = []
        updates: list[Update] = []
        begun, total = 0, steps * workers

        def begin(clock: float, server: int) -> None:
            nonlocal begun
            if begun == total:
                return
            members = range(server * per_server, (server + 1) * per_server)
            pushes = tuple(Push(worker, begun + place, (len(updates),)) for place, worker in enumerate(members))
            begun += per_server
            # parameters come down two levels, and gradients go up two
            finish = clock + 4 * times.travel + max(next(seconds[worker]) for worker in members)
            heapq.heappush(flying, (finish, server, pushes))

        for server in range(self.servers):
            begin(0.0, server)
        while flying:
            clock, server, pushes = heapq.heappop(flying)
            updates.append(Update(clock, pushes, len(updates)))
            begin(clock, server)
        return updates


@dataclass(frozen=True, slots=True)
class LocalStep:
    """A step of a worker on its own copy of the parameters.

    Attributes:
      seconds: End of the step, on the virtual clock.
      worker: Number of the worker.
      share: Index of its examples, as in `Push`.
      meets: Whether the worker and the center move towards each other before the step.
      staleness: Meetings of other workers with the center since this worker's last one; 0 without a meeting.
    """

    seconds: float
    worker: int
    share: int
    meets: bool
    staleness: int = 0


@dataclass(frozen=True, kw_only=True)
class AsynchronousEasgd:
    """Asynchronous EASGD (Zhang, Choromanska, LeCun 2015, arXiv:1412.6651, algorithm 1).

    After every `every` steps of a worker, its parameters x and the center c move by alpha (x - c) towards each other;
    alpha is beta over the number of workers. The step's gradient is computed at x before the move. The paper's step is
    SGD (algorithm 2 has momentum); here it is the job's optimizer, with a state for each worker.

    Attributes:
      every: Steps of a worker from one meeting to its next, the paper's communication period tau.
      beta: Alpha times the number of workers; the paper has 0.9.
      name: Name of the method.
    """

    every: int = 10
    beta: float = 0.9
    name: str = "async-easgd"
    shards = 1

    def __post_init__(self):
        check_ranges(self, "", {"every": (1, STEPS), "beta": (0.0, 1.0)})

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch: one per worker."""
        return workers

    def alpha(self, workers: int) -> float:
        """Returns the fraction of their difference by which a worker and the center move towards each other."""
        return self.beta / workers

    def local_steps(self, workers: int, steps: int, times: WorkerTimes) -> list[LocalStep]:
        """Returns the steps of all workers; those that end in a meeting are in the order of their meetings.

        Args:
          workers: Number of workers.
          steps: Mean number of steps per worker.
          times: Times of the workers; a meeting adds the travel time to the center and back.
        """
        seconds = [times.stream(worker) for worker in range(workers)]
        count, last_meeting = [0] * workers, [0] * workers  # each worker's begun steps; meetings up to its last one
        idle = [(0.0, worker) for worker in range(workers)]
        table: list[LocalStep] = []
        meetings = 0
        for share in range(steps * workers):
            clock, worker = heapq.heappop(idle)
            meets = count[worker] % self.every == 0
            staleness = meetings - last_meeting[worker] if meets else 0
            if meets:
                meetings += 1
                last_meeting[worker] = meetings
            count[worker] += 1
            clock += next(seconds[worker]) + 2 * times.travel * meets
            table.append(LocalStep(clock, worker, share, meets, staleness))
            heapq.heappush(idle, (clock, worker))
        return table
