"""The watchdog of one process: the training sets its heartbeat in memory; a turn writes it, reads others' and judges.

    at, wish, state ─► heartbeat ─► turn: children's files ─► digest ─► own file;  file of process 0 ─► digest of all

Nothing here waits, and only a turn opens files: `jaxpar.train.watchdog.thread` takes one every so often, in a thread.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from jaxpar.errors import Problem
from jaxpar.train.watchdog import decisions as stop
from jaxpar.train.watchdog.beat import Files, Heartbeat, unknown
from jaxpar.train.watchdog.decisions import TOGETHER, is_agreed, judge
from jaxpar.train.watchdog.digest import Digest, merge

# The tree of who reads whose heartbeat: a process opens a few files per turn, however many processes there are.

WIDTH = 16  # files that a process reads per level of the tree, at most
EVERY = 0.5  # seconds between two heartbeats, where processes are few
OPENED = 3  # files per process and turn: its own, by its parent, and that of process 0
MOST = 15_000  # files that all processes open per second: a shared file system answers 100,000, and has other users
TURNS = 5  # turns of silence that may happen to a healthy process


def children(process: int, count: int) -> list[int]:
    """Returns the processes whose heartbeats a process reads, in order.

    >>> children(0, 50)[12:]
    [13, 14, 15, 16, 32, 48]
    >>> children(48, 50)
    [49]
    >>> children(7, 50)
    []
    """
    found: list[int] = []
    stride = 1
    while stride < count and process % (stride * WIDTH) == 0:
        found += range(process + stride, min(count, process + stride * WIDTH), stride)
        stride *= WIDTH
    return found


def shortest(count: int) -> float:
    """Returns the least seconds between turns of `count` processes, so that they open no more than `MOST` files."""
    return count * OPENED / MOST


def interval(count: int, limit: float) -> float:
    """Returns the seconds between two turns.

    Args:
      count: Number of processes.
      limit: Seconds within which a silent one is to be found.

    >>> interval(3, 30.0), round(interval(4096, 30.0), 2)
    (0.5, 0.82)
    """
    return max(min(EVERY, limit / 10), shortest(count))


def patience(count: int, limit: float) -> float:
    """Returns the seconds of silence after which a process counts as lost: `limit`, or longer where turns are rare."""
    return max(limit, TURNS * interval(count, limit))


AGREEING = "agreeing on the"  # the activity of a process that waits for others to state a fact begins so


class Watchdog:
    """The watchdog of one process.

    Args:
      files: The folder of the heartbeats.
      process: Number of this process.
      count: Number of processes.
      limit: Seconds without a heartbeat, or of keeping others waiting, after which a process is lost.
      clock: A monotonic clock, in seconds.

    Attributes:
      known: The digest of all processes, as of the last turn.
    """

    def __init__(
        self, files: Files, *, process: int, count: int, limit: float, clock: Callable[[], float] = time.monotonic
    ):
        self.files, self.process, self.count, self.clock = files, process, count, clock
        self.interval, self.limit = interval(count, limit), patience(count, limit)
        self._children = children(process, count)
        self._lock = threading.Lock()
        self._beat = Heartbeat(process=process)
        self._reached = 0
        # process to its last (pid, count), and when that was first read: silence is measured by this process's own
        # clock, as clocks of hosts differ
        self._heard: dict[int, tuple[tuple[int, int], float]] = {}
        self._before, self._awake, self._began = clock(), 0.0, 0.0
        self._said = unknown(0)
        self.known = Digest()

    @property
    def beat(self) -> Heartbeat:
        """The heartbeat of this process."""
        return self._beat

    @property
    def first(self) -> Heartbeat:
        """The heartbeat of process 0, as far as this one knows."""
        return self._said if self.process else self._beat

    # called by the training

    def begin_activity(self, step: int, doing: str) -> None:
        """Begins an activity: all processes begin the same ones in the same order."""
        with self._lock:
            self._begin(replace(self._beat, step=step, doing=doing))

    def state(self, what: str, value: str) -> int:
        """States a fact by its hash, and returns its number; this process waits for the others from then on."""
        with self._lock:
            index = self._beat.fact[0] + 1
            self._begin(replace(self._beat, fact=(index, value), doing=f"{AGREEING} {what}"))
            return index

    def wish(self, name: str) -> None:
        """Reports that this process got a signal to stop."""
        with self._lock:
            if not self._beat.stop:
                self._beat = replace(self._beat, stop=name)

    def holds(self, step: int) -> bool:
        """Whether this process waits after a step until process 0 names the last one."""
        with self._lock:
            self._reached = max(self._reached, step)
            if held := stop.holds(self._beat, self.first, step):
                self._began = self._age()  # waiting for the decision makes nobody late
            return held

    def stops(self, step: int) -> str | None:
        """Returns the signal for which all stop after this step, or None."""
        return stop.stops(self.first, step)

    def end(self, doing: str) -> None:
        """Writes the last heartbeat of this process."""
        with self._lock:
            self._beat = replace(self._beat, doing=doing)
        self._write()

    # a turn

    def turn(self) -> Problem | None:
        """Writes this process's heartbeat and reads others'; returns the problem with a process of the run, if any.

        Raises:
          OSError: If the folder cannot be written.
        """
        now = self.clock()
        with self._lock:
            if now - self._before > 4 * self.interval:
                # this process itself was stopped, by a signal or a paused machine: by its clock all others seem silent
                # since then, so they are timed anew
                self._heard.clear()
            self._awake, self._before = self._age(now), now
        below = merge(self._hear(child, now) for child in self._children)
        if self.process == 0:
            self._lead(below)
        self._write(below)
        if self.process:
            self.known = self._hear(0, now)
        with self._lock:
            self._beat = stop.promise(self._beat, self.first, self._reached)
        return judge(self.process, self.known, limit=self.limit)

    def _begin(self, beat: Heartbeat) -> None:
        """Begins the next activity, and records how long the one before it took; the lock is held."""
        now, before = self._age(), self._beat
        longest = before.longest
        if before.doing not in TOGETHER and not before.doing.startswith(AGREEING):
            took = round(now - self._began, 2)
            longest = {**longest, before.doing: max(took, longest.get(before.doing, 0.0))}
        self._beat = replace(beat, place=before.place + 1, longest=longest)
        self._began = now

    def _age(self, now: float | None = None) -> float:
        """Returns the seconds that this process has been running, without those in which it was stopped."""
        return self._awake + min((self.clock() if now is None else now) - self._before, 4 * self.interval)

    def _hear(self, process: int, now: float) -> Digest:
        """Returns the digest of a process and of those below it."""
        beat = self.files.read(process) or unknown(process)
        if process == 0:
            # a decision of process 0 stays, even if a shared file system shows an older file, or for a moment none
            self._said = beat = max(self._said, beat, key=lambda each: each.count)
        alone = beat.digest(self._silence(beat, now))
        return alone if beat.below is None else alone + beat.below

    def _silence(self, beat: Heartbeat, now: float) -> float:
        """Returns for how many seconds the heartbeat of a process has not changed, by this one's clock."""
        life = (beat.pid, beat.count)
        if beat.process not in self._heard or self._heard[beat.process][0] != life:
            self._heard[beat.process] = (life, now)
        return round(now - self._heard[beat.process][1], 2)

    def _lead(self, below: Digest) -> None:
        """Decides, as process 0, where all stop and on which facts they agree."""
        with self._lock:
            self._beat = replace(self._beat, stuck=round(self._age() - self._began, 2))
            self.known = merge([self._beat.digest(), below])
            self._beat = stop.decide(self._beat, self.known, self.count)
            if is_agreed(self.known, self._beat.agreed + 1, self.count):
                self._beat = replace(self._beat, agreed=self._beat.agreed + 1)

    def _write(self, below: Digest | None = None) -> None:
        with self._lock:
            self._beat = beat = replace(
                self._beat,
                count=self._beat.count + 1,
                stuck=round(self._age() - self._began, 2),
                below=self._beat.below if below is None else below if self._children else None,
            )
        # outside of the lock: a slow file system must not hold up the training, which takes it in every step
        try:
            self.files.write(beat)
        except OSError:  # of a file server that is away nobody is heard, and the first that is back would blame others
            self._heard.clear()
            raise
