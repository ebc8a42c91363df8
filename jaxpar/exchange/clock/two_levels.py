"""A parameter server in two levels on a virtual clock: workers have servers of their own, and these have a root.

    root      v0 ───► v1 ────────► v2                 an update is one server's mean
    servers    └ mean of m ┘└ mean of m ┘             each waits for its m workers, and for no other server
    workers      m to each

Of N workers under g servers, with w bytes of parameters, a step of all workers sends

                  g = N, without servers     g servers of m = N / g     and the mean staleness is
    root          2 N w                      2 g w                      g - 1 updates, instead of N - 1
    server                                   2 (m + 1) w
    worker        2 w                        2 w

Half of it goes each way: parameters down, gradients up.
"""

import heapq
from dataclasses import dataclass

from jaxpar.errors import check_ranges, nearest_divisor, refuse
from jaxpar.exchange.clock.delays import Times
from jaxpar.exchange.clock.events import Push, Update


@dataclass(frozen=True, kw_only=True)
class TwoLevels:
    """Synchronous under each server, asynchronous between them (Gupta, Zhang, Wang 2016, arXiv:1509.04210).

    With one server it is synchronous SGD; with as many as workers asynchronous SGD, whose messages go twice as far.
    Gupta et al. let servers of a tree send on what they have summed so far; here a server waits for all its workers.

    Attributes:
      servers: Below the root; they divide the workers.
      name: What it is called.
    """

    servers: int = 2
    name: str = "servers"
    shards = 1

    def __post_init__(self):
        check_ranges(self, "", {"servers": (1, 2**16)})

    def shares(self, workers: int) -> int:
        """Returns the workers: each computes a share of a batch.

        Raises:
          JaxparError: If servers have not as many each.
        """
        if workers % self.servers:
            raise refuse(
                f"{self.servers} servers of {workers} workers",
                rule="servers have as many workers each",
                fix=f"servers:{nearest_divisor(workers, self.servers) or 1}",
            )
        return workers

    def updates(self, workers: int, steps: int, times: Times) -> list[Update]:
        """Returns all updates in the order of their times."""
        under = self.shares(workers) // self.servers
        seconds = [times.of(worker) for worker in range(workers)]
        flying: list[tuple[float, int, tuple[Push, ...]]] = []
        made: list[Update] = []
        begun, total = 0, steps * workers

        def begin(now: float, server: int) -> None:
            nonlocal begun
            if begun == total:
                return
            own = range(server * under, (server + 1) * under)
            pushes = tuple(Push(worker, begun + place, (len(made),)) for place, worker in enumerate(own))
            begun += under
            # parameters come down two levels, and gradients go up two
            done = now + 4 * times.travel + max(next(seconds[worker]) for worker in own)
            heapq.heappush(flying, (done, server, pushes))

        for server in range(self.servers):
            begin(0.0, server)
        while flying:
            now, server, pushes = heapq.heappop(flying)
            made.append(Update(now, pushes, len(made)))
            begin(now, server)
        return made
