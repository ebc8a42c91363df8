"""Simulates asynchronous, stale-synchronous and backup workers on a virtual clock, and names all simulated methods.

    worker 0  read v0 ──────► push ─► read v1 ───────► push
    worker 1  read v0 ───────────────────► push ─► read v2 ...
                              └ v1                └ v2

A worker reads, computes, pushes, and reads again. When a worker reads, the server first updates the parameters by the
mean of the gradients pushed since its last update (Ho et al. take their sum, which needs a learning rate smaller by
their number). If no worker waits, this is one gradient; if all wait for all, it is the mean of all: a synchronous step.

`SIMULATED` has the methods by name, each with the setting that a number after a colon sets: `ssp:3`.
"""

import heapq
import itertools
from dataclasses import dataclass, field

from jaxpar.errors import JaxparError, check_ranges, refuse
from jaxpar.exchange.clock.base import Push, SimulatedRun, Update, WorkerTimes
from jaxpar.exchange.clock.parameter_servers import AsynchronousEasgd, Downpour, TwoLevels


@dataclass(frozen=True, kw_only=True)
class Stale:
    """Stale-synchronous parallel (Ho et al. 2013): the fastest worker leads the slowest by at most `bound` steps.

    A bound of 0 is synchronous SGD. None is asynchronous SGD, whose mean staleness is the number of workers minus 1.

    Attributes:
      bound: Number of steps; None for no bound.
      name: Name of the method.
    """

    bound: int | None = None
    name: str = "ssp"
    shards = 1

    def __post_init__(self):
        if self.bound is not None and self.bound < 0:
            raise refuse(f"bound = {self.bound}", rule="a lead is of no step, or of some", fix="bound = 0, or None")

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch: one per worker."""
        return workers

    def updates(self, workers: int, steps: int, times: WorkerTimes) -> list[Update]:
        """Returns all updates in the order of their times."""
        run = _Simulation(workers, steps * workers, times)
        run.start_ready(0.0, self.bound)
        while run.in_flight:
            run.finish_next(self.bound)
        run.flush(run.now)
        return run.updates_so_far


@dataclass
class _Simulation:
    workers: int
    total: int  # gradients of the whole run
    times: WorkerTimes
    now: float = 0.0
    num_started: int = 0
    updates_so_far: list[Update] = field(default_factory=list)
    pending: list[Push] = field(default_factory=list)  # pushed, not yet in an update
    in_flight: list[tuple[float, int, Push]] = field(default_factory=list)

    def __post_init__(self):
        self.clocks = [0] * self.workers  # gradients pushed by each worker
        self.waiting = list(range(self.workers))
        self.seconds = [self.times.stream(worker) for worker in range(self.workers)]

    def start_ready(self, now: float, bound: int | None) -> None:
        """Lets the waiting workers read that are at most `bound` steps ahead of the slowest."""
        slowest = min(self.clocks)
        ready = [worker for worker in self.waiting if bound is None or self.clocks[worker] - slowest <= bound]
        self.waiting = [worker for worker in self.waiting if worker not in ready]
        for worker in ready:
            self.flush(now)
            if self.num_started == self.total:
                return
            push = Push(worker, self.num_started, (len(self.updates_so_far),))
            self.num_started += 1
            heapq.heappush(self.in_flight, (now + next(self.seconds[worker]) + 2 * self.times.travel, worker, push))

    def finish_next(self, bound: int | None) -> None:
        """Advances the clock to the next finished gradient, and pushes it."""
        self.now, worker, push = heapq.heappop(self.in_flight)
        self.clocks[worker] += 1
        self.pending.append(push)
        self.waiting = sorted([*self.waiting, worker])
        self.start_ready(self.now, bound)

    def flush(self, now: float) -> None:
        """Updates the parameters by the pending gradients."""
        if self.pending:
            pushes = tuple(sorted(self.pending, key=lambda push: push.share))
            self.updates_so_far.append(Update(now, pushes, len(self.updates_so_far)))
            self.pending = []


@dataclass(frozen=True, kw_only=True)
class Backup:
    """Synchronous SGD with backup workers (Chen et al. 2016, arXiv:1604.00981): the slowest of each step are dropped.

    Of N + b workers, the first N gradients at the newest version are one update. The server drops a later gradient and
    its examples; its worker then reads again, late for the next update.

    Attributes:
      extra: Number b of backup workers.
      name: Name of the method.
    """

    extra: int = 1
    name: str = "backup"
    shards = 1

    def __post_init__(self):
        check_ranges(self, "", {"extra": (0, 2**31 - 1)})

    def shares(self, workers: int) -> int:
        """Returns the number of shares of a batch: one per worker that an update waits for.

        Raises:
          JaxparError: If there are not fewer backup workers than others.
        """
        if self.extra >= workers / 2:
            raise refuse(
                f"{self.extra} backups of {workers} workers",
                rule="more workers are waited for than are backups",
                fix=f"backup:{max((workers - 1) // 2, 0)}, or a larger parallel.data",
            )
        return workers - self.extra

    def updates(self, workers: int, steps: int, times: WorkerTimes) -> list[Update]:
        """Returns all updates in the order of their times."""
        count, updates = self.shares(workers), []
        seconds = [times.stream(worker) for worker in range(workers)]
        in_flight: list[tuple[float, int, Push]] = []
        num_started = itertools.count()

        def read(clock: float, worker: int) -> None:
            push = Push(worker, next(num_started), (len(updates),))
            heapq.heappush(in_flight, (clock + next(seconds[worker]) + 2 * times.travel, worker, push))

        for worker in range(workers):
            read(0.0, worker)
        while len(updates) < steps:
            pushes: list[Push] = []
            while True:
                clock, worker, push = heapq.heappop(in_flight)
                if push.versions != (len(updates),):
                    read(clock, worker)
                    continue
                pushes.append(push)
                if len(pushes) == count:
                    break
            updates.append(Update(clock, tuple(sorted(pushes, key=lambda push: push.share)), len(updates)))
            for worker in sorted(push.worker for push in pushes):
                read(clock, worker)
        return updates


# name of a method to its class, and to the setting that `name:number` sets; "" for none
SIMULATED = {
    "async": (Stale, ""),
    "ssp": (Stale, "bound"),
    "backup": (Backup, "extra"),
    "downpour": (Downpour, "shards"),
    "servers": (TwoLevels, "servers"),
    "async-easgd": (AsynchronousEasgd, "every"),
}


def parse_method(name: str, number: str) -> SimulatedRun | AsynchronousEasgd:
    """Constructs the method with this name and number, such as `ssp` and 3.

    Raises:
      JaxparError: If the number cannot be parsed, or is out of its range.
    """
    kind, key = SIMULATED[name]
    example = f"{name}:3" if key else name
    if bool(key) != bool(number):
        raise refuse(f"method {name}{':' * bool(number)}{number}", rule=f"it is written {example}", fix=example)
    if not key:
        return kind(name=name)
    try:
        return kind(name=name, **{key: int(number)})
    except JaxparError:
        raise
    except ValueError as error:
        raise refuse(f"method {name}:{number}", rule=f"{key} is a whole number", fix=example) from error
