"""The watchdog in a thread, as the training loop uses it: it reports activities, and learns when all stop.

A collective waits for ever for a process that is gone, stopped, late or runs another program. So a thread in every
process writes and reads heartbeats, as `jaxpar.train.watchdog` describes, and ends the process with an error that names
the one at fault. The heartbeats are in the run folder, which all hosts share for its checkpoints. Calls of the training
loop only change values in memory: a step never waits for the file system.
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

# seconds that a process waits before it ends: when its connections close, JAX aborts the others, and they should have
# printed the same reason by then
PAUSE = 3 * watchdog.EVERY
BROKEN = ("Gloo", "onnection", "heartbeat", "oordination", "NCCL", "UNAVAILABLE")  # words of a collective that failed


class LostPeer(JaxparError):
    """Another process of the run is gone, stopped, late, or has failed."""

    status = LOST


class SingleProcess:
    """The watchdog of a run with one process, which does nothing: the interface of `WatchdogThread`."""

    count, process = 1, 0

    def begin_activity(self, step: int, doing: str) -> None:
        """Reports the activity that begins now."""

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Reports that this process compiles, and afterwards the activity before."""
        yield

    def stopping(self, wish: str | None, step: int) -> str | None:
        """Returns the signal for which all stop after this step, or None."""
        return wish

    def agree(self, what: str, value: str) -> None:
        """Waits until all processes have stated this value, and raises if one states another."""

    def explain(self, error: Exception) -> Exception:
        """Returns the cause of a collective's error."""
        return error

    def close(self, doing: str = "done") -> None:
        """Reports that this process ends."""


class WatchdogThread(SingleProcess):
    """The watchdog of one of several processes, with its thread.

    Args:
      folder: The run folder.
      attempt: Name of this start of the run; the same for all processes.
      process: Number of this process.
      count: Number of processes.
      limit: Seconds without a heartbeat, or of keeping others waiting, after which a process is lost.
      end: Function that ends this process when another is lost, with a problem.
    """

    def __init__(
        self, folder: Path, attempt: str, *, process: int, count: int, limit: float, end: Callable | None = None
    ):
        self.process, self.count, self.limit = process, count, limit
        self.folder = folder / "processes" / name_of(attempt)
        self._end = end or _end
        self._watchdog = Watchdog(Files(self.folder), process=process, count=count, limit=limit)
        self._lost: Problem | None = None
        self._closed = threading.Event()
        self._asked = threading.Event()  # set to make the thread take its next turn at once
        self._turned = threading.Condition()  # notified after each turn, for a main thread that waits
        self._waiting: float | None = None  # since when the main thread waits for the others
        self._watchdog.turn()  # the first turn in the main thread: a folder that cannot be written is an error at once
        self._thread = threading.Thread(target=self._watch, name="jaxpar-peers", daemon=True)
        self._thread.start()

    def begin_activity(self, step: int, doing: str) -> None:
        """Reports the activity that begins now: all processes report the same ones in the same order."""
        self._watchdog.begin_activity(step, doing)

    @contextmanager
    def compiling(self) -> Iterator[None]:
        """Reports that this process compiles, and afterwards the activity before."""
        before = self._watchdog.beat
        self.begin_activity(before.step, "compiling")
        yield
        self.begin_activity(before.step, before.doing)

    def stopping(self, wish: str | None, step: int) -> str | None:
        """Returns the signal that any process got, after the step that all agreed on.

        Once a process wants to stop, each waits after the next step that it finishes until it knows which one is the
        last: a second or two, or as long as the shared folder shows old files.

        Raises:
          LostPeer: If another process is lost meanwhile.
        """
        if wish and not self._watchdog.beat.stop:
            self._watchdog.wish(wish)
            self._asked.set()
        if self._watchdog.holds(step):
            self._wait(lambda: not self._watchdog.holds(step))
        return self._watchdog.stops(step)

    def agree(self, what: str, value: str) -> None:
        """Waits until all processes have stated this value; the watchdog's thread finds one that does not come.

        Raises:
          JaxparError: If one states another value: which process, and where the texts differ.
          LostPeer: If one is lost, or too late.
        """
        text, before, begin = f"{what}\n{value}", self._watchdog.beat, time.monotonic()
        self._watchdog.files.state(self.process, text)
        index = self._watchdog.state(what, decisions.digest_of(text))

        def differs() -> bool:
            stated = self._watchdog.known.stated(index)
            late = time.monotonic() - begin > self._watchdog.limit
            return len(stated) > 1 and (late or sum(count for count, _ in stated.values()) == self.count)

        self._wait(lambda: self._watchdog.first.agreed >= index or differs())
        if self._watchdog.first.agreed < index:
            time.sleep(PAUSE)  # until the others have found the same difference, and read this one's text
            raise decisions.disagreement(what, self._watchdog.known.stated(index), self._watchdog.files)
        self.begin_activity(before.step, before.doing)

    def explain(self, error: Exception) -> Exception:
        """Returns the cause of a broken collective; waits a moment for a process that reports why it ended.

        A connection breaks within milliseconds, its reason comes with the heartbeat of the process that failed.
        """
        if not any(word in str(error) for word in BROKEN):
            return error
        # not watched: this process ends anyway, and should name the one that failed rather than a silence that follows
        begin, quiet = time.monotonic(), 2 * self._watchdog.interval
        self._wait(lambda: self._failed() is not None or time.monotonic() - begin > 2 * quiet, watched=False)
        if failed := self._failed():
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
                # process 0 waits longer: it hosts JAX's coordination service, and when that is gone the others are
                # aborted, whatever they were about to report
                time.sleep(PAUSE * (1 if self.process else 2))

    def _failed(self) -> str | None:
        failed = self._watchdog.known.failed
        return failed[1] if failed and failed[0] != self.process else None

    def _wait(self, done: Callable[[], bool], *, watched: bool = True) -> None:
        """Waits until a condition on the others holds; the thread takes its turns faster meanwhile.

        Raises:
          LostPeer: If one is lost meanwhile, and this one is watched.
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
        """Returns the seconds until the next turn: a tenth while the main thread waits, and more again as it does."""
        every = self._watchdog.interval
        hurried = self._waiting is not None or (self._watchdog.first.stop and not self._watchdog.first.stop_at)
        if not hurried:
            return every
        waited = time.monotonic() - (self._waiting or time.monotonic())
        return min(every, max(watchdog.shortest(self.count), every / 10, waited / 50))

    def _watch(self) -> None:
        away = Away(self.folder)
        while True:
            self._asked.wait(self._pause())
            self._asked.clear()
            if self._closed.is_set():
                return
            try:
                problem = self._watchdog.turn()
            except OSError as error:  # a file server that is away for a moment must not end the run
                away.note(error)
                time.sleep(self._watchdog.interval)
                continue
            away.end()
            if problem and not self._closed.is_set():
                # with many processes turns are rare: the others should have found the same before this one is gone,
                # else they would name this one
                time.sleep(max(0.0, 2 * self._watchdog.interval - PAUSE))
                self._lost = problem
                self._end(problem)
            with self._turned:
                self._turned.notify_all()


class Away:
    """Says that a folder cannot be written: at once, whenever that has lasted twice as long, and at its end.

    Args:
      folder: The folder.
      clock: Returns seconds.
    """

    def __init__(self, folder: Path, clock: Callable[[], float] = time.monotonic):
        self._folder, self._clock = folder, clock
        self._since: float | None = None
        self._next = 0.0  # seconds of absence at which it is said again

    def note(self, error: OSError) -> None:
        """Notes a write that failed."""
        now = self._clock()
        if self._since is None:
            self._since, self._next = now, 1.0
            self._say(f"{error.strerror}; no process of the run is watched until it can be written")
        elif now - self._since >= self._next:
            self._next = 2 * (now - self._since)
            self._say(f"{error.strerror}, for {now - self._since:.0f} s")

    def end(self) -> None:
        """Notes a write that did not fail."""
        if self._since is not None:
            self._say(f"can be written again, after {self._clock() - self._since:.0f} s")
            self._since = None

    def _say(self, text: str) -> None:
        with suppress(OSError, ValueError):  # a stream that is closed must not end the thread
            print(f"warning: {self._folder}: {text}", file=sys.stderr, flush=True)


def report(run: Path, process: int, pid: int, how: str) -> None:
    """Reports for a process of this host that it failed, where it could not do so itself, as after SIGKILL."""
    for file in (run / "processes").glob(f"*/{process}.json"):
        beat = read(file.parent, process)
        if beat and (beat.host, beat.pid) == (socket.gethostname(), pid) and not beat.ended:
            write(file.parent, dataclasses.replace(beat, doing=f"failed: it {how}", count=beat.count + 1))


def name_of(attempt: str) -> str:
    """Returns an attempt as the name of a folder."""
    return re.sub(r"[^\w.]+", "-", attempt).strip(".-")


def _end(problem: Problem) -> NoReturn:
    """Ends this process from a thread: its main thread may wait in a collective for ever."""
    exit_process(LOST, f"error: {problem}", pause=PAUSE)


def forget(folder: Path, keep: int = 3) -> None:
    """Deletes the folders of earlier starts of a run, except the latest ones."""
    folder = folder / "processes"
    if folder.is_dir():
        old = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)
        for path in old[keep:]:
            shutil.rmtree(path, ignore_errors=True)
