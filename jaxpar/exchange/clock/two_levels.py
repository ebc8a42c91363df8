"""Simulates a parameter server in two levels on a virtual clock: groups of workers have servers, and these have a root.

    root      v0 ───► v1 ────────► v2                 an update is one server's mean
    servers    └ mean of m ┘└ mean of m ┘             a server waits for its m workers, and for no other server
    workers      m per server

With N workers under g servers and w bytes of parameters, these bytes are sent when each worker makes a step:

                  g = N, without servers     g servers of m = N / g     and the mean staleness is
    root          2 N w                      2 g w                      g - 1 updates, instead of N - 1
    server                                   2 (m + 1) w
    worker        2 w                        2 w

Half of these bytes are parameters sent down, half are gradients sent up.
"""

import heapq
from dataclasses import dataclass

from jaxpar.errors import check_ranges, nearest_divisor, refuse
from jaxpar.exchange.clock.delays import WorkerTimes
from jaxpar.exchange.clock.events import Push, Update


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
