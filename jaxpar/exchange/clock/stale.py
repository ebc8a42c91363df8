"""Workers on a virtual clock that need not wait for each other: asynchronous, stale-synchronous, and with backups.

    worker 0  read v0 ──────► push ─► read v1 ───────► push
    worker 1  read v0 ───────────────────► push ─► read v2 ...
                              └ v1                └ v2

A worker reads, computes, pushes, and reads again. The server makes an update when somebody reads: by the mean of what
was pushed since it last made one (Ho et al. add up what was pushed: with their sum the rate is as many times smaller).
Where nobody waits that is one gradient; where all wait for all it is the mean of
all, which is a synchronous step.
"""

import heapq
import itertools
from dataclasses import dataclass, field

from jaxpar.errors import check_ranges, refuse
from jaxpar.exchange.clock.delays import Times
from jaxpar.exchange.clock.events import Push, Update


@dataclass(frozen=True, kw_only=True)
class Stale:
    """Stale-synchronous parallel (Ho et al. 2013): the fastest worker leads the slowest by at most `bound` steps.

    With 0 it is synchronous SGD; with None asynchronous SGD, whose mean staleness is the number of the other workers.

    Attributes:
      bound: Steps; None for no bound.
      name: What it is called.
    """

    bound: int | None = None
    name: str = "ssp"
    shards = 1

    def __post_init__(self):
        if self.bound is not None and self.bound < 0:
            raise refuse(f"bound = {self.bound}", rule="a lead is of no step, or of some", fix="bound = 0, or None")

    def shares(self, workers: int) -> int:
        """Returns the workers: each computes a share of a batch."""
        return workers

    def updates(self, workers: int, steps: int, times: Times) -> list[Update]:
        """Returns all updates in the order of their times."""
        run = _Run(workers, steps * workers, times)
        run.release(0.0, self.bound)
        while run.flying:
            run.land(self.bound)
        run.flush(run.now)
        return run.made


@dataclass
class _Run:
    """Workers while the clock goes on."""

    workers: int
    total: int  # gradients of the whole run
    times: Times
    now: float = 0.0
    begun: int = 0
    made: list[Update] = field(default_factory=list)
    pending: list[Push] = field(default_factory=list)  # pushed, and in no update yet
    flying: list[tuple[float, int, Push]] = field(default_factory=list)

    def __post_init__(self):
        self.clocks = [0] * self.workers  # gradients that each has pushed
        self.waiting = list(range(self.workers))
        self.seconds = [self.times.of(worker) for worker in range(self.workers)]

    def release(self, now: float, bound: int | None) -> None:
        """Lets all read that may: who does not lead the slowest by more than the bound."""
        slowest = min(self.clocks)
        may = [worker for worker in self.waiting if bound is None or self.clocks[worker] - slowest <= bound]
        self.waiting = [worker for worker in self.waiting if worker not in may]
        for worker in may:
            self.flush(now)
            if self.begun == self.total:
                return
            push = Push(worker, self.begun, (len(self.made),))
            self.begun += 1
            heapq.heappush(self.flying, (now + next(self.seconds[worker]) + 2 * self.times.travel, worker, push))

    def land(self, bound: int | None) -> None:
        """Takes the next gradient that is finished."""
        self.now, worker, push = heapq.heappop(self.flying)
        self.clocks[worker] += 1
        self.pending.append(push)
        self.waiting = sorted([*self.waiting, worker])
        self.release(self.now, bound)

    def flush(self, now: float) -> None:
        """Makes an update of what is pending."""
        if self.pending:
            pushes = tuple(sorted(self.pending, key=lambda push: push.share))
            self.made.append(Update(now, pushes, len(self.made)))
            self.pending = []


@dataclass(frozen=True, kw_only=True)
class Backup:
    """Synchronous SGD with backup workers (Chen et al. 2016, arXiv:1604.00981): the slowest of each step are dropped.

    Of N + b workers the first N whose gradients are of the newest version make an update. A worker that is late sends
    its gradient all the same, which is dropped when it comes, and its examples with it; then it reads again. So it is
    late for the next update too, or takes no part in it.

    Attributes:
      extra: Workers that are not waited for, b.
      name: What it is called.
    """

    extra: int = 1
    name: str = "backup"
    shards = 1

    def __post_init__(self):
        check_ranges(self, "", {"extra": (0, 2**31 - 1)})

    def shares(self, workers: int) -> int:
        """Returns how many workers are waited for.

        Raises:
          JaxparError: If none would be.
        """
        if self.extra >= workers / 2:
            raise refuse(
                f"{self.extra} backups of {workers} workers",
                rule="more workers are waited for than are backups",
                fix=f"backup:{max((workers - 1) // 2, 0)}, or a larger parallel.data",
            )
        return workers - self.extra

    def updates(self, workers: int, steps: int, times: Times) -> list[Update]:
        """Returns all updates in the order of their times."""
        count, made = self.shares(workers), []
        seconds = [times.of(worker) for worker in range(workers)]
        flying: list[tuple[float, int, Push]] = []
        begun = itertools.count()

        def read(now: float, worker: int) -> None:
            push = Push(worker, next(begun), (len(made),))
            heapq.heappush(flying, (now + next(seconds[worker]) + 2 * times.travel, worker, push))

        for worker in range(workers):
            read(0.0, worker)
        while len(made) < steps:
            pushes: list[Push] = []
            while True:
                now, worker, push = heapq.heappop(flying)
                if push.read != (len(made),):
                    read(now, worker)
                    continue
                pushes.append(push)
                if len(pushes) == count:
                    break
            made.append(Update(now, tuple(sorted(pushes, key=lambda push: push.share)), len(made)))
            for worker in sorted(push.worker for push in pushes):
                read(now, worker)
        return made
