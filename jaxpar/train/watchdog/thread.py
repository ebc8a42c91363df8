"""The watchdog thread: the training loop reports activities to it, and asks it after which step all processes stop.

A collective waits forever for a process that is gone, stopped, late or runs another program. So a thread in every
process writes and reads heartbeats (see `jaxpar.train.watchdog`). If a process is lost, the thread ends its own process
with an error that names the lost one. The heartbeats are in the run folder, which all hosts share for checkpoints. The
training loop's calls change only values in memory: a step never waits for the file system.
"""

import dataclasses
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from jaxpar.errors import LOST, JaxparError, Problem, describe_exception
from jaxpar.process_exit import exit_process
from jaxpar.train.watchdog import decisions, watchdog
from jaxpar.train.watchdog.beat import Files, read, write
from jaxpar.train.watchdog.decisions import ON
from jaxpar.train.watchdog.watchdog import Watchdog

# seconds that a process waits before it ends. Its end makes JAX abort the other processes; the wait leaves them time
# to find and print the same reason first
PAUSE = 3 * watchdog.EVERY
BROKEN = ("Gloo", "onnection", "heartbeat", "oordination", "NCCL", "UNAVAILABLE")  # in errors of failed collectives


class LostPeer(JaxparError):
    """Another process of the run is gone, stopped, late, or has failed."""

    status = LOST


class SingleProcess:
    """The watchdog of a run with a single process: it does nothing, and has the interface of `WatchdogThread`."""

    count, process = 1, 0

    def begin_activity(self, step: int, doing: str) -> None:
        """Reports that an activity begins now."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Reports that this process compiles inside the block, and afterwards the previous activity."""
        yield

    def stopping(self, wish: str | None, step: int) -> str | None:
        """Returns the signal for which all processes stop after this step, or None."""
        return wish

    def agree(self, what: str, value: str) -> None:
        """Waits until all processes have stated this value; raises if one states a different value."""

    def explain(self, error: Exception) -> Exception:
        """Returns the cause of an error in a collective."""
        return error

    def close(self, doing: str = "done") -> None:
        """Reports that this process ends."""


class WatchdogThread(SingleProcess):
    """The watchdog of one of several processes, with its thread.

    Args:
      folder: The run folder.
      attempt: Name of this start of the run, equal on all processes.
      process: Number of this process.
      count: Number of processes.
      limit: Seconds without a heartbeat, or of keeping others waiting, after which a process counts as lost.
      end: Called with a `Problem` to end this process when another process is lost.
    """

    def __init__(
        self, folder: Path, attempt: str, *, process: int, count: int, limit: float, end: Callable | None = None
    ):
        self.process, self.count, self.limit = process, count, limit
        self.folder = folder / "processes" / attempt_folder(attempt)
        self._end = end or _end
        self._watchdog = Watchdog(Files(self.folder), process=process, count=count, limit=limit)
        self._lost: Problem | None = None
        self._closed = threading.Event()
        self._asked = threading.Event()  # set to make the thread take its next turn at once
        self._turned = threading.Condition()  # notified after each turn, for a main thread that waits
        self._waiting: float | None = None  # time at which the main thread began to wait for the others
        self._watchdog.turn()  # first turn in the main thread, so that an unwritable folder raises at once
        self._thread = threading.Thread(target=self._watch, name="jaxpar-peers", daemon=True)
        self._thread.start()

    def begin_activity(self, step: int, doing: str) -> None:
        """Reports that an activity begins now; all processes must report the same activities in the same order."""
        self._watchdog.begin_activity(step, doing)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Reports that this process compiles inside the block, and afterwards the previous activity."""
        before = self._watchdog.beat
        self.begin_activity(before.step, "compiling")
        yield
        self.begin_activity(before.step, before.doing)

    def stopping(self, wish: str | None, step: int) -> str | None:
        """Returns the signal that any process got if this is the step after which all stop, otherwise None.

        Once a process wants to stop, every process waits after its next finished step until it knows the last step:
        a second or two, or longer if the shared folder shows outdated files.

        Raises:
          LostPeer: If another process is lost during the wait.
        """
        if wish and not self._watchdog.beat.stop:
            self._watchdog.wish(wish)
            self._asked.set()
        if self._watchdog.holds(step):
            self._wait(lambda: not self._watchdog.holds(step))
        return self._watchdog.stops(step)

    def agree(self, what: str, value: str) -> None:
        """Waits until all processes have stated this value. The thread detects a process that never states one.

        Raises:
          JaxparError: If a process states a different value; the error names it and shows the differing lines.
          LostPeer: If a process is lost or late.
        """
        text, before, begin = f"{what}\n{value}", self._watchdog.beat, time.monotonic()
        self._watchdog.files.state(self.process, text)
        index = self._watchdog.state(what, decisions.hash_text(text))

        def differs() -> bool:
            stated = self._watchdog.known.fact_counts(index)
            late = time.monotonic() - begin > self._watchdog.limit
            return len(stated) > 1 and (late or sum(count for count, _ in stated.values()) == self.count)

        self._wait(lambda: self._watchdog.first.agreed >= index or differs())
        if self._watchdog.first.agreed < index:
            time.sleep(PAUSE)  # keeps this process alive until the others have seen the difference and read its text
            raise decisions.disagreement(what, self._watchdog.known.fact_counts(index), self._watchdog.files)
        self.begin_activity(before.step, before.doing)

    def explain(self, error: Exception) -> Exception:
        """Returns the cause of a broken collective; waits a moment for the failed process to report it.

        The wait is needed because a connection breaks within milliseconds, while the reason arrives with the next
        heartbeat of the failed process.
        """
        if not any(word in str(error) for word in BROKEN):
            return error
        # not watched: this process ends anyway, and should name the failed process, not one that is silent as a result
        begin, quiet = time.monotonic(), 2 * self._watchdog.interval
        self._wait(lambda: bool(_failed_peer(self._watchdog)) or time.monotonic() - begin > 2 * quiet, watched=False)
        if failed := _failed_peer(self._watchdog):
            return LostPeer(Problem(failed, "all processes of a run train until its end", ON))
        silent = self._watchdog.known.silent
        who = f"{silent[1]}, which was {silent[2]}" if silent and silent[0] > quiet else "a process"
        got = f"the connection to {who} is gone ({describe_exception(error):.160})"
        return LostPeer(Problem(got, "all processes of a run train until its end", ON))

    def close(self, doing: str = "done") -> None:
        """Reports that this process ends, and stops the thread."""
        if not self._closed.is_set():
            self._closed.set()
            self._asked.set()
            self._thread.join(timeout=4 * watchdog.EVERY)
            self._watchdog.end(doing)
            if self._watchdog.beat.failed:
                # process 0 waits longer: it hosts JAX's coordination service, and the others are aborted when that
                # ends, even before they can report
                time.sleep(PAUSE * (1 if self.process else 2))

    def _wait(self, done: Callable[[], bool], *, watched: bool = True) -> None:
        """Waits until `done()` holds; in the meantime the thread takes its turns more often.

        Raises:
          LostPeer: If `watched`, and another process is lost during the wait.
        """
        self._waiting = time.monotonic()
        self._asked.set()
        try:
            with self._turned:
                while not done():
                    if watched and self._lost is not None:
                        raise LostPeer(self._lost)
                    self._turned.wait(self._pause())
        finally:
            self._waiting = None

    def _pause(self) -> float:
        """Returns the seconds until the next turn: a tenth if the main thread waits, rising during the wait."""
        every = self._watchdog.interval
        hurried = self._waiting is not None or (self._watchdog.first.stop and not self._watchdog.first.stop_at)
        if not hurried:
            return every
        waited = time.monotonic() - (self._waiting or time.monotonic())
        return min(every, max(watchdog.shortest_interval(self.count), every / 10, waited / 50))

    def _watch(self) -> None:
        away = FolderOutage(self.folder)
        while True:
            self._asked.wait(self._pause())
            self._asked.clear()
            if self._closed.is_set():
                return
            try:
                problem = self._watchdog.turn()
            except OSError as error:  # a brief outage of the file server must not end the run
                away.note(error)
                time.sleep(self._watchdog.interval)
                continue
            away.end()
            if problem and not self._closed.is_set():
                # with many processes turns are rare: the others should find the same problem before this process
                # ends, or they would name this one
                time.sleep(max(0.0, 2 * self._watchdog.interval - PAUSE))
                self._lost = problem
                self._end(problem)
            with self._turned:
                self._turned.notify_all()


def _failed_peer(own: Watchdog) -> str:
    failed = own.known.failed
    return failed[1] if failed and failed[0] != own.process else ""


class FolderOutage:
    """Warns that a folder cannot be written: at once, each time the outage has doubled, and at its end.

    Args:
      folder: The folder.
      clock: A monotonic clock, in seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder, clock
        self._since: float | None = None
        self._next = 0.0  # duration of the outage at which the next warning is due

    def note(self, error: OSError) -> None:
        """Records a failed write."""
        now = self._clock()
        if self._since is None:
            self._since, self._next = now, 1.0
            self._say(f"{error.strerror}; no process of the run is watched until it can be written")
        elif now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            self._say(f"{error.strerror}, for {now - self._since:.0f} s")

    def end(self) -> None:
        """Records a successful write."""
        if self._since is not None:
            self._say(f"can be written again, after {self._clock() - self._since:.0f} s")
            self._since = None

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a closed stderr must not end the thread
            print(f"warning: {self._folder}: {text}", file=sys.stderr, flush=True)


def report(run: Path, process: int, pid: int, how: str) -> None:
    """Reports the failure of a process of this host that could not do so itself, e.g. after SIGKILL."""
    for file in (run / "processes").glob(f"*/{process}.json"):
        beat = read(file.parent, process)
        if beat and (beat.host, beat.pid) == (socket.gethostname(), pid) and not beat.ended:
            write(file.parent, dataclasses.replace(beat, doing=f"failed: it {how}", count=beat.count + 1))


def attempt_folder(attempt: str) -> str:
    """Converts the name of an attempt to a valid folder name."""
    return re.sub(r"[^\w.]+", "-", attempt).strip(".-")


def _end(problem: Problem) -> NoReturn:
    """Ends this process from a thread, as its main thread may wait in a collective forever."""
    exit_process(LOST, f"error: {problem}", pause=PAUSE)


def forget(folder: Path, keep: int = 3) -> None:
    """Deletes the heartbeat folders of earlier starts of a run, except the newest `keep`."""
    folder = folder / "processes"
    if folder.is_dir():
        old = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)
        for path in old[keep:]:
            shutil.rmtree(path, ignore_errors=True)
