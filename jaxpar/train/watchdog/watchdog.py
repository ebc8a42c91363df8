"""The watchdog of one process: training updates a heartbeat in memory; a turn writes it, reads others', and decides.

    begin_activity, wish, state ─► heartbeat ─┐
    files of the children ─► digest ──────────┴► own file          file of process 0 ─► digest of all ─► judge

Nothing here waits, and only `turn` opens files: `jaxpar.train.watchdog.thread` calls it regularly in a thread.
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

# Processes read heartbeats along a tree: each opens a few files per turn, whatever the number of processes.

WIDTH = 16  # most files that a process reads per level of the tree
EVERY = 0.5  # seconds between two heartbeats of a run with few processes
OPENED = 3  # files opened per process and turn: its own, its own again by its parent, and that of process 0
MOST = 15_000  # most files that all processes open per second; a shared file system serves 100,000, to several users
TURNS = 5  # turns without a heartbeat that may happen in a healthy process


def children(process: int, count: int) -> list[int]:
    """Returns the children of a process in the tree, in order; it reads their heartbeats.

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


def shortest_interval(count: int) -> float:
    """Returns the minimum seconds between turns at which `count` processes open at most `MOST` files per second."""
    return count * OPENED / MOST


def interval(count: int, limit: float) -> float:
    """Returns the seconds between two turns.

    Args:
      count: Number of processes.
      limit: Seconds within which a silent process must be detected.

    >>> interval(3, 30.0), round(interval(4096, 30.0), 2)
    (0.5, 0.82)
    """
    return max(min(EVERY, limit / 10), shortest_interval(count))


def patience(count: int, limit: float) -> float:
    """Returns the seconds without a heartbeat after which a process counts as lost: at least `limit`."""
    return max(limit, TURNS * interval(count, limit))


AGREEING = "agreeing on the"  # prefix of the activity of a process that waits for others to state a fact


class Watchdog:
    """The watchdog of one process.

    Args:
      files: The folder of the heartbeats.
      process: Number of this process.
      count: Number of processes.
      limit: Seconds without a heartbeat, or of keeping others waiting, after which a process counts as lost.
      clock: A monotonic clock, in seconds.

    Attributes:
      known: The digest of all processes at the last turn.
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
        # process to its last (pid, count), and the time at which this process first read it: silence is measured by
        # this process's own clock, as the clocks of hosts differ
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
        """The last heartbeat of process 0 that this process has read."""
        return self._said if self.process else self._beat

    # called by the training loop

    def begin_activity(self, step: int, doing: str) -> None:
        """Begins an activity; all processes must begin the same activities in the same order."""
        with self._lock:
            self._begin(replace(self._beat, step=step, doing=doing))

    def state(self, what: str, value: str) -> int:
        """States a fact by its hash and returns its number; from now on this process waits for the others."""
        with self._lock:
            index = self._beat.fact[0] + 1
            self._begin(replace(self._beat, fact=(index, value), doing=f"{AGREEING} {what}"))
            return index

    def wish(self, name: str) -> None:
        """Reports that this process got a stop signal."""
        with self._lock:
            if not self._beat.stop:
                self._beat = replace(self._beat, stop=name)

    def holds(self, step: int) -> bool:
        """Returns whether this process must wait after a step until process 0 names the last step."""
        with self._lock:
            self._reached = max(self._reached, step)
            if held := stop.holds(self._beat, self.first, step):
                self._began = self._age()  # a wait for the decision does not count as lateness
            return held

    def stops(self, step: int) -> str | None:
        """Returns the signal for which all processes stop after this step, or None."""
        return stop.stops(self.first, step)

    def end(self, doing: str) -> None:
        """Writes the last heartbeat of this process."""
        with self._lock:
            self._beat = replace(self._beat, doing=doing)
        self._write()

    # called by the thread

    def turn(self) -> Problem | None:
        """Writes this process's heartbeat and reads others'; returns the problem with a process of the run, or None.

        Raises:
          OSError: If the folder cannot be written.
        """
        now = self.clock()
        with self._lock:
            if now - self._before > 4 * self.interval:
                # this process itself was paused (by a signal, or with its machine), so all other heartbeats look old:
                # measure their ages from now on
                self._heard.clear()
            self._awake, self._before = self._age(now), now
        below = merge(self._read_heartbeat(child, now) for child in self._children)
        if self.process == 0:
            self._decide(below)
        self._write(below)
        if self.process:
            self.known = self._read_heartbeat(0, now)
        with self._lock:
            self._beat = stop.promise(self._beat, self.first, self._reached)
        return judge(self.process, self.known, limit=self.limit)

    def _begin(self, beat: Heartbeat) -> None:
        """Begins the next activity and records the duration of the last one; the caller holds the lock."""
        now, before = self._age(), self._beat
        longest = before.longest
        if before.doing not in TOGETHER and not before.doing.startswith(AGREEING):
            took = round(now - self._began, 2)
            longest = {**longest, before.doing: max(took, longest.get(before.doing, 0.0))}
        self._beat = replace(beat, place=before.place + 1, longest=longest)
        self._began = now

    def _age(self, now: float | None = None) -> float:
        """Returns the seconds that this process has been running, without time during which it was stopped."""
        return self._awake + min((self.clock() if now is None else now) - self._before, 4 * self.interval)

    def _read_heartbeat(self, process: int, now: float) -> Digest:
        """Reads the heartbeat of a process; returns the digest of it and of the processes below it."""
        beat = self.files.read(process) or unknown(process)
        if process == 0:
            # keep the newest heartbeat of process 0: a shared file system may briefly show an older file, or none
            self._said = beat = max(self._said, beat, key=lambda each: each.count)
        alone = beat.digest(self._silent_seconds(beat, now))
        return alone if beat.below is None else alone + beat.below

    def _silent_seconds(self, beat: Heartbeat, now: float) -> float:
        """Returns the seconds since the heartbeat of a process last changed, by this process's clock."""
        life = (beat.pid, beat.count)
        if beat.process not in self._heard or self._heard[beat.process][0] != life:
            self._heard[beat.process] = (life, now)
        return round(now - self._heard[beat.process][1], 2)

    def _decide(self, below: Digest) -> None:
        """Decides, in process 0, the step after which all stop, and which facts all agree on."""
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
        # outside the lock, which the training takes in every step: a slow file system must not delay the training
        try:
            self.files.write(beat)
        except OSError:  # in an outage all heartbeats seem old: after it, their ages are measured anew
            self._heard.clear()
            raise
