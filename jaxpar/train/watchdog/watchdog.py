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
from jaxpar.train.watchdog import decisions
from jaxpar.train.watchdog.beat import Files, Heartbeat, unknown
from jaxpar.train.watchdog.digest import Digest, merge

# Processes read heartbeats along a tree: each opens a few files per turn, whatever the number of processes.

WIDTH = 16  # most files that a process reads per level of the tree
EVERY = 0.5  # seconds between two heartbeats of a run with few processes
FILES_PER_TURN = 3  # files opened per process and turn: its own, its own again by its parent, and that of process 0
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
    return count * FILES_PER_TURN / MOST


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


class AwakeClock:
    """The seconds that this process has been running, without time during which it was stopped.

    Args:
      clock: A monotonic clock, in seconds.
      longest: Seconds between two calls of `advance`, above which the process was stopped.
    """

    def __init__(self, clock: Callable[[], float], longest: float):
        self._clock, self._longest = clock, longest
        self._before, self._awake, self._began = clock(), 0.0, 0.0

    def advance(self) -> tuple[float, bool]:
        """Returns the time of the monotonic clock, and whether the process was stopped since the last call."""
        now = self._clock()
        stopped = now - self._before > self._longest
        self._awake, self._before = self._seconds(now), now
        return now, stopped

    def activity_seconds(self) -> float:
        """Returns the duration of the current activity."""
        return round(self._seconds(self._clock()) - self._began, 2)

    def begin_activity(self) -> float:
        """Begins an activity; returns the duration of the one before."""
        now, began = self._seconds(self._clock()), self._began
        self._began = now
        return round(now - began, 2)

    def _seconds(self, now: float) -> float:
        return self._awake + min(now - self._before, self._longest)


class Watchdog:
    """The watchdog of one process.

    Args:
      files: The folder of the heartbeats.
      process: Number of this process.
      count: Number of processes.
      limit: Seconds without a heartbeat, or of keeping others waiting, after which a process counts as lost.
      clock: A monotonic clock, in seconds.

    Attributes:
      beat: The heartbeat of this process.
      known: The digest of all processes at the last turn.
    """

    def __init__(
        self, files: Files, *, process: int, count: int, limit: float, clock: Callable[[], float] = time.monotonic
    ):
        self.files, self.process, self.count = files, process, count
        self.interval, self.limit = interval(count, limit), patience(count, limit)
        self._children, self._peers = children(process, count), HeartbeatReader(files)
        self._lock, self._clock = threading.Lock(), AwakeClock(clock, 4 * self.interval)
        self.beat, self.known, self._reached = Heartbeat(process=process), Digest(), 0

    @property
    def first(self) -> Heartbeat:
        """The last heartbeat of process 0 that this process has read."""
        return self._peers.first if self.process else self.beat

    # called by the training loop

    def begin_activity(self, step: int, doing: str) -> None:
        """Begins an activity; all processes must begin the same activities in the same order."""
        with self._lock:
            self.beat = decisions.next_activity(self.beat, self._clock.begin_activity(), step=step, doing=doing)

    def state(self, what: str, value: str) -> int:
        """States a fact by its hash and returns its number; from now on this process waits for the others."""
        with self._lock:
            fact, doing = (self.beat.fact[0] + 1, value), f"{decisions.AGREEING} {what}"
            self.beat = decisions.next_activity(self.beat, self._clock.begin_activity(), fact=fact, doing=doing)
            return fact[0]

    def wish(self, name: str) -> None:
        """Reports that this process got a stop signal."""
        with self._lock:
            if not self.beat.stop:
                self.beat = replace(self.beat, stop=name)

    def holds(self, step: int) -> bool:
        """Returns whether this process must wait after a step until process 0 names the last step."""
        with self._lock:
            self._reached = max(self._reached, step)
            if held := decisions.holds(self.beat, self.first, step):
                self._clock.begin_activity()  # a wait for the decision does not count as lateness
            return held

    def stops(self, step: int) -> str | None:
        """Returns the signal for which all processes stop after this step, or None."""
        return decisions.stops(self.first, step)

    def end(self, doing: str) -> None:
        """Writes the last heartbeat of this process."""
        with self._lock:
            self.beat = replace(self.beat, doing=doing)
        self._write()

    # called by the thread

    def turn(self) -> Problem | None:
        """Writes this process's heartbeat and reads others'; returns the problem with a process of the run, or None.

        Raises:
          OSError: If the folder cannot be written.
        """
        with self._lock:
            now, stopped = self._clock.advance()
            if stopped:  # this process itself, by a signal or with its machine
                self._peers.restart()
        below = merge(self._peers.read(child, now) for child in self._children)
        if self.process == 0:
            with self._lock:
                self.beat = replace(self.beat, stuck=self._clock.activity_seconds())
                self.known = merge([self.beat.digest(), below])
                self.beat = decisions.decide(self.beat, self.known, self.count)
        self._write(below)
        if self.process:
            self.known = self._peers.read(0, now)
        with self._lock:
            self.beat = decisions.promise(self.beat, self.first, self._reached)
        return decisions.judge(self.process, self.known, limit=self.limit)

    def _write(self, below: Digest | None = None) -> None:
        with self._lock:
            self.beat = beat = replace(
                self.beat,
                count=self.beat.count + 1,
                stuck=self._clock.activity_seconds(),
                below=self.beat.below if below is None else below if self._children else None,
            )
        # outside the lock, which the training takes in every step: a slow file system must not delay the training
        try:
            self.files.write(beat)
        except OSError:
            self._peers.restart()
            raise


class HeartbeatReader:
    """Reads heartbeats, and measures silence by this process's own clock, as the clocks of hosts differ.

    Args:
      files: The folder of the heartbeats.

    Attributes:
      first: The newest heartbeat of process 0 that was read.
    """

    def __init__(self, files: Files):
        self._files = files
        # process to its last (pid, count), and the time at which this process first read it
        self._heard: dict[int, tuple[tuple[int, int], float]] = {}
        self.first = unknown(0)

    def read(self, process: int, now: float) -> Digest:
        """Reads the heartbeat of a process; returns the digest of it and of the processes below it."""
        beat = self._files.read(process) or unknown(process)
        if process == 0:
            # keep the newest heartbeat of process 0: a shared file system may briefly show an older file, or none
            self.first = beat = max(self.first, beat, key=lambda each: each.count)
        alone = beat.digest(self._silent_seconds(beat, now))
        return alone if beat.below is None else alone + beat.below

    def _silent_seconds(self, beat: Heartbeat, now: float) -> float:
        life = (beat.pid, beat.count)
        if beat.process not in self._heard or self._heard[beat.process][0] != life:
            self._heard[beat.process] = (life, now)
        return round(now - self._heard[beat.process][1], 2)

    def restart(self) -> None:
        """Measures all silences from now on, after a time in which this process could not read: all seem old."""
        self._heard.clear()
