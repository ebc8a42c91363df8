"""One process's part in the watch: the training says what it does in memory; a turn writes, reads and judges.

    at, wish, state ─► beat ─► turn: children's files ─► digest ─► own file;  process 0's file ─► what all know

Nothing here waits, and only a turn opens files: `jaxpar.train.watchdog.thread` takes one every so often, in a thread.
"""

import threading
import time
from collections.abc import Callable
from dataclasses import replace

from jaxpar.errors import Problem
from jaxpar.train.watchdog import stop, tree
from jaxpar.train.watchdog.beat import Files, Heartbeat, unknown
from jaxpar.train.watchdog.digest import Digest, merge
from jaxpar.train.watchdog.facts import agreed
from jaxpar.train.watchdog.judge import TOGETHER, judge

AGREEING = "agreeing on the"  # how a process that waits for others to state a fact says what it does


class Watchdog:
    """The watchdog of one process.

    Args:
      files: Where processes find each other.
      process: This one's number.
      count: How many there are.
      limit: Seconds without a sign of life, or in the way of others.
      clock: Seconds, never going back.

    Attributes:
      known: What is known of all processes, as of the last turn.
    """

    def __init__(
        self, files: Files, *, process: int, count: int, limit: float, clock: Callable[[], float] = time.monotonic
    ):
        self.files, self.process, self.count, self.clock = files, process, count, clock
        self.interval, self.limit = tree.interval(count, limit), tree.patience(count, limit)
        self._children = tree.children(process, count)
        self._lock = threading.Lock()
        self._beat = Heartbeat(process=process)
        self._reached = 0
        self._heard: dict[int, tuple[tuple[int, int], float]] = {}  # process to a sign of life, and when it was new
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

    # what the training says

    def at(self, step: int, doing: str) -> None:
        """Says what this process does now: all processes say the same things in the same order."""
        with self._lock:
            self._begin(replace(self._beat, step=step, doing=doing))

    def state(self, what: str, value: str) -> int:
        """States a fact by its hash, and returns its number; this process waits for the others from then on."""
        with self._lock:
            index = self._beat.fact[0] + 1
            self._begin(replace(self._beat, fact=(index, value), doing=f"{AGREEING} {what}"))
            return index

    def wish(self, name: str) -> None:
        """Says that this process got a signal to stop."""
        with self._lock:
            if not self._beat.stop:
                self._beat = replace(self._beat, stop=name)

    def holds(self, step: int) -> bool:
        """Whether this process waits after a step until process 0 says which one is the last."""
        with self._lock:
            self._reached = max(self._reached, step)
            if held := stop.holds(self._beat, self.first, step):
                self._began = self._age()  # nobody is late because of it
            return held

    def stops(self, step: int) -> str | None:
        """Returns the signal because of which all stop after this step."""
        return stop.stops(self.first, step)

    def end(self, doing: str) -> None:
        """Says, in its file, that this process ends."""
        with self._lock:
            self._beat = replace(self._beat, doing=doing)
        self._write()

    # a turn

    def turn(self) -> Problem | None:
        """Says and hears what there is; returns what is wrong with a process of the run.

        Raises:
          OSError: If the folder cannot be written.
        """
        now = self.clock()
        with self._lock:
            if now - self._before > 4 * self.interval:  # this process itself was stopped: what it heard is old
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
        """Begins the next thing, and keeps what the one before it took; the lock is held."""
        now, before = self._age(), self._beat
        longest = before.longest
        if before.doing not in TOGETHER and not before.doing.startswith(AGREEING):
            took = round(now - self._began, 2)
            longest = {**longest, before.doing: max(took, longest.get(before.doing, 0.0))}
        self._beat = replace(beat, place=before.place + 1, longest=longest)
        self._began = now

    def _age(self, now: float | None = None) -> float:
        """Returns for how many seconds this process has lived, but for those in which it was stopped."""
        return self._awake + min((self.clock() if now is None else now) - self._before, 4 * self.interval)

    def _hear(self, process: int, now: float) -> Digest:
        """Returns what is known of a process and of those below it."""
        beat = self.files.read(process) or unknown(process)
        if process == 0:
            # what process 0 has decided stays, though the folder shows an older file, or for a moment none
            self._said = beat = max(self._said, beat, key=lambda each: each.count)
        alone = beat.digest(self._silence(beat, now))
        return alone if beat.below is None else alone + beat.below

    def _silence(self, beat: Heartbeat, now: float) -> float:
        """Returns for how many seconds a process has said the same, by this one's clock."""
        life = (beat.pid, beat.count)
        if beat.process not in self._heard or self._heard[beat.process][0] != life:
            self._heard[beat.process] = (life, now)
        return round(now - self._heard[beat.process][1], 2)

    def _lead(self, below: Digest) -> None:
        """Decides, as process 0, what all agree on."""
        with self._lock:
            self._beat = replace(self._beat, stuck=round(self._age() - self._began, 2))
            self.known = merge([self._beat.digest(), below])
            self._beat = stop.decide(self._beat, self.known, self.count)
            if agreed(self.known, self._beat.agreed + 1, self.count):
                self._beat = replace(self._beat, agreed=self._beat.agreed + 1)

    def _write(self, below: Digest | None = None) -> None:
        with self._lock:
            self._beat = beat = replace(
                self._beat,
                count=self._beat.count + 1,
                stuck=round(self._age() - self._began, 2),
                below=self._beat.below if below is None else below if self._children else None,
            )
        self.files.write(beat)
