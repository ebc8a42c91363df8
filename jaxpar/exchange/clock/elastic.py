"""Asynchronous elastic averaging on a virtual clock: workers train their own copies, and one by one meet a center.

    worker 0   meet ─ step ─ step ─ meet ─ step ─ step ─ meet         every = 2
    worker 1   meet ── step ──── step ── meet ── step ── ...
    center       └ moves at each meeting, in the order in which workers come

At a meeting, a worker's parameters and the center move towards each other. No worker waits for another. A worker's
staleness is the number of times that the center has moved since the worker's last meeting.
"""

import heapq
from dataclasses import dataclass

from jaxpar.errors import check_ranges
from jaxpar.exchange.base import STEPS
from jaxpar.exchange.clock.base import WorkerTimes


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
