"""Processes of a run that are none: each takes its turns when it is told to, by a clock that is set.

dogs       watchdogs of one run, on one folder
turns      lets all of them take turns while seconds pass
Training   the steps of one of them
StaleFiles a folder that shows what it held some seconds ago, as a shared file system's attribute cache does
"""

from jaxpar.train.watchdog.beat import Files
from jaxpar.train.watchdog.watchdog import Watchdog


class Clock:
    """Seconds that pass when they are told to."""

    now = 0.0

    def __call__(self):
        return self.now


class StaleFiles(Files):
    """What one process sees of a folder: of the others' files, what they held so many seconds ago."""

    def __init__(self, folder, clock, held, *, process, delay):
        super().__init__(folder)
        self.clock, self.held, self.process, self.delay = clock, held, process, delay

    def write(self, beat):
        self.held.setdefault(beat.process, []).append((self.clock(), beat))

    def read(self, process):
        seen = self.clock() - self.delay
        return next((beat for when, beat in reversed(self.held.get(process, [])) if when <= seen), None)


def dogs(folder, count, *, limit=30.0, delay=0.0):
    """Returns the watchdogs of a run, and their clock."""
    clock, held = Clock(), {}
    return [
        Watchdog(
            StaleFiles(folder, clock, held, process=process, delay=delay), process=process, count=count, limit=limit,
            clock=clock,
        )
        for process in range(count)
    ], clock  # fmt: skip


class Training:
    """The training of a process: it makes steps, and after each asks whether to stop, as the loop does."""

    def __init__(self, dog):
        self.dog, self.step, self.asks, self.stopped = dog, 0, False, False

    def go(self, most):
        """Goes on by a step, but not beyond `most`: its collectives wait for the others."""
        if self.asks and not self.stopped and not self.dog.holds(self.step):
            self.asks, self.stopped = False, self.dog.stops(self.step) is not None
        if not self.asks and not self.stopped and self.step < most:
            self.step, self.asks = self.step + 1, True


def turns(dogs, clock, seconds, *, but=()):
    """Lets all but some take turns for so many seconds; returns what the last turn of each has found."""
    found, until = {}, clock.now + seconds
    while clock.now < until:
        clock.now += dogs[0].interval
        for dog in dogs:
            if dog.process not in but:
                found[dog.process] = dog.turn()
    return found
