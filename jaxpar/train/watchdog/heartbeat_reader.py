"""The heartbeats of other processes, as this one reads them, and for how long each has not changed."""

from jaxpar.train.watchdog.beat import Files, Heartbeat, unknown
from jaxpar.train.watchdog.digest import Digest


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
