"""What the processes of a run tell each other beside the training, so that none waits in silence.

    RUN/processes/ID/3.json   what process 3 does, written anew twice a second by a thread of its own

A collective waits for ever for a process that is gone, stopped, late or runs another program. So every
process watches the others' files with its own clock and ends itself, with the name of the one at fault.
The folder is the run's: whoever shares its checkpoints shares it.
"""

import dataclasses
import difflib
import json
import os
import re
import shutil
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NoReturn

from jaxpar.errors import LOST, JaxparError, Problem, refuse, said
from jaxpar.leaving import leave
from jaxpar.train.checkpoint.files import FULL

EVERY = 0.5  # seconds between two signs of life
SLOW = 10  # times as patient with what compiles, saves or evaluates
AHEAD = 4  # steps between the wish to stop and the step at which all do
PAUSE = 3 * EVERY  # before a process ends: without its connections others would be aborted before they can say the same
ROOM = 512  # bytes that a beat may grow by on a full disk
ON = "the same command goes on from the newest checkpoint; jaxpar launch does so by itself"
PATIENT = ("compiling", "evaluating", "saving", "restoring", "starting")


class LostPeer(JaxparError):
    """A process of the run is gone, stopped, late, or was made to end."""

    status = LOST


@dataclass(frozen=True, kw_only=True)
class Beat:
    """What a process says of itself.

    Attributes:
      process: Its number.
      host, pid: Where it is.
      count: How often it has said so: a stopped process no longer counts.
      place: How many things it has begun; all processes begin the same ones in the same order.
      step: The step it is in.
      doing: What it does, in words; `done` and `failed: ...` at its end.
      facts: What must be the same everywhere, by name.
      stop: The signal that asked it to stop, or "".
      stop_at: The step after which all stop, or 0; only process 0 decides.
    """

    process: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    count: int = 0
    place: int = 0
    step: int = 0
    doing: str = "starting"
    facts: Mapping[str, str] = field(default_factory=dict)
    stop: str = ""
    stop_at: int = 0

    @property
    def name(self) -> str:
        """`process 3 (host a, pid 12)`."""
        return f"process {self.process} (host {self.host}, pid {self.pid})"

    @property
    def ended(self) -> bool:
        """Whether it has nothing more to say."""
        return self.doing == "done" or self.failed

    @property
    def failed(self) -> bool:
        """Whether it ended before the run did."""
        return self.doing.startswith("failed: ")


@dataclass
class Heard:
    """The last beat of a process, and for how long it has said the same.

    Attributes:
      beat: As read.
      silent: Seconds since its count changed, by the reader's clock.
      stuck: Seconds since it began what it does.
    """

    beat: Beat
    silent: float = 0.0
    stuck: float = 0.0


def judge(me: int, heard: Mapping[int, Heard], *, limit: float) -> Problem | None:
    """Returns what is wrong with another process, or with this one in the others' eyes.

    Args:
      me: The process that asks; it takes itself to be alive.
      heard: Every process.
      limit: Seconds.
    """
    for process, other in heard.items():
        beat = other.beat
        if beat.failed:
            if process != me:
                return Problem(f"{beat.name} ended: {beat.doing.removeprefix('failed: ')}", "all processes train", ON)
        elif not beat.ended and process != me and other.silent > limit:
            return Problem(
                f"{beat.name} has given no sign of life for {other.silent:.0f} s; it was {_doing(beat)}",
                f"a process that is gone or stopped ends the run after {limit:g} s",
                ON,
            )
    going = {process: other for process, other in heard.items() if not other.beat.ended}
    if len(going) < 2:
        return None
    last = min(other.beat.place for other in going.values())
    waiting = [other for other in going.values() if other.beat.place > last]
    late = [other for other in going.values() if other.beat.place == last]
    if not waiting or min(other.stuck for other in waiting) <= limit:
        return None
    if min(other.stuck for other in late) <= limit * (SLOW if late[0].beat.doing in PATIENT else 1):
        return None
    names = ", ".join(other.beat.name for other in late)
    return Problem(
        f"{names} {'is' if len(late) == 1 else 'are'} late: {_doing(late[0].beat)} for {late[0].stuck:.0f} s, while "
        f"{len(waiting)} other{'s wait' if len(waiting) > 1 else ' waits'}, {_doing(waiting[0].beat)}",
        f"no process keeps the others waiting for more than {limit:g} s",
        ON,
    )


def _doing(beat: Beat) -> str:
    return f"{beat.doing} (step {beat.step})" if beat.step else beat.doing


class Alone:
    """The one process of a run: it has nobody to tell."""

    count, process = 1, 0

    def at(self, step: int, doing: str) -> None:
        """Says what this process does now."""

    def stopping(self, wish: str | None, step: int) -> str | None:
        """Returns the signal because of which all stop after this step, or None."""
        return wish

    def agree(self, what: str, value: str) -> None:
        """Waits until all have said this, and refuses to go on if one said something else."""

    def explain(self, error: Exception) -> Exception:
        """Returns an error of a collective as what it means."""
        return error

    def close(self, doing: str = "done") -> None:
        """Says that this process ends."""


class Peers(Alone):
    """All processes of a run, from the point of view of one.

    Args:
      folder: The run folder.
      attempt: What tells this start of the run from others; the same for all processes.
      process: This one's number.
      count: How many there are.
      limit: Seconds without a sign of life, or in the way of others.
      end: What ends this process when another is lost, with a problem.
    """

    def __init__(
        self, folder: Path, attempt: str, *, process: int, count: int, limit: float, end: Callable | None = None
    ):
        self.process, self.count, self.limit = process, count, limit
        self.folder = folder / "processes" / name_of(attempt)
        self.folder.mkdir(parents=True, exist_ok=True)
        self._end = end or _end
        self.every = min(EVERY, limit / 10)
        self._lock = threading.Lock()
        self._beat = Beat(process=process)
        self._heard: dict[int, Heard] = {}
        self._seen: dict[int, tuple[tuple, float, tuple, float]] = {}
        self._closed = threading.Event()
        self._say()
        self._thread = threading.Thread(target=self._watch, name="jaxpar-peers", daemon=True)
        self._thread.start()

    def at(self, step: int, doing: str) -> None:
        """Says what this process does now: all processes say the same things in the same order."""
        self._change(place=self._beat.place + 1, step=step, doing=doing)

    def stopping(self, wish: str | None, step: int) -> str | None:
        """Returns the signal that any process got, after the step that process 0 chose for all to stop."""
        if wish and not self._beat.stop:
            self._change(stop=wish)
        decided = self._read(0) if self.process else self._beat
        if self.process == 0 and not self._beat.stop_at:
            wishes = [self._beat.stop, *(beat.stop for p in range(1, self.count) if (beat := self._read(p)))]
            if any(wishes):
                self._change(stop_at=step + AHEAD, stop=next(filter(None, wishes)))
        return decided.stop if decided and decided.stop_at and decided.stop_at <= step else None

    def agree(self, what: str, value: str) -> None:
        """Waits until all have said this.

        Raises:
          JaxparError: If one said something else: which one, and where it differs.
          LostPeer: If one did not come so far.
        """
        self._change(facts={**self._beat.facts, what: value})
        begin = time.monotonic()
        while True:
            beats = {process: self._read(process) for process in range(self.count)}
            said = {p: beat.facts[what] for p, beat in beats.items() if beat is not None and what in beat.facts}
            waited = time.monotonic() - begin
            if len(set(said.values())) > 1 and (len(said) == self.count or waited > self.limit):
                time.sleep(PAUSE)
                raise _disagreement(what, {p: (beats[p].name, value) for p, value in said.items()})  # pyright: ignore
            if len(said) == self.count:
                return
            if waited > self.limit * SLOW:
                missing = [beats[p].name if beats[p] else f"process {p}" for p in beats if p not in said]  # pyright: ignore
                raise self._lost(f"{', '.join(missing)} did not come as far as {what} in {self.limit * SLOW:g} s")
            time.sleep(EVERY / 5)

    def explain(self, error: Exception) -> Exception:
        """Returns what a broken collective means; waits a moment for a process that says why it ended."""
        text = str(error)
        if not any(word in text for word in ("Gloo", "onnection", "heartbeat", "oordination", "NCCL", "UNAVAILABLE")):
            return error
        begin = time.monotonic()
        while time.monotonic() - begin < 4 * EVERY:
            self._listen()
            failed = [h.beat for p, h in self._heard.items() if p != self.process and h.beat.failed]
            if failed:
                return self._lost(f"{failed[0].name} ended: {failed[0].doing.removeprefix('failed: ')}")
            time.sleep(EVERY / 2)
        silent = [h for p, h in self._heard.items() if p != self.process and h.silent > 2 * EVERY]
        who = ", ".join(f"{h.beat.name}, which was {_doing(h.beat)}" for h in silent) or "a process"
        return self._lost(f"the connection to {who} is gone ({said(error):.160})")

    def close(self, doing: str = "done") -> None:
        """Says that this process ends, and watches no more."""
        if not self._closed.is_set():
            self._closed.set()
            self._change(doing=doing)
            self._thread.join(timeout=4 * EVERY)
            if self._beat.failed:  # the others end with the first, which coordinates: it waits until they have spoken
                time.sleep(PAUSE * (1 if self.process else 2))

    def _lost(self, got: str) -> LostPeer:
        return LostPeer(Problem(got, "all processes of a run train until its end", ON))

    def _change(self, **changes: Any) -> None:
        with self._lock:
            self._beat = dataclasses.replace(self._beat, **changes)
        self._say()

    def _say(self) -> None:
        with self._lock:
            self._beat = dataclasses.replace(self._beat, count=self._beat.count + 1)
            write(self.folder, self._beat)

    def _read(self, process: int) -> Beat | None:
        return read(self.folder, process)

    def _listen(self) -> None:
        now = time.monotonic()
        for process in range(self.count):
            beat = self._read(process) or Beat(process=process, host="unknown", pid=0)
            life, place = (beat.pid, beat.count), (beat.pid, beat.place)
            before = self._seen.get(process, (None, now, None, now))
            self._seen[process] = (
                life, before[1] if before[0] == life else now, place, before[3] if before[2] == place else now
            )  # fmt: skip
            self._heard[process] = Heard(beat, now - self._seen[process][1], now - self._seen[process][3])

    def _watch(self) -> None:
        before = time.monotonic()
        while not self._closed.wait(self.every):
            now = time.monotonic()
            if now - before > 4 * self.every:  # this process itself was stopped: what it heard is old
                self._seen.clear()
            before = now
            try:
                self._say()
                self._listen()
            except OSError as error:
                print(f"warning: {self.folder}: {error.strerror}", file=sys.stderr, flush=True)
                continue
            if (problem := judge(self.process, self._heard, limit=self.limit)) and not self._closed.is_set():
                self._end(problem)


def read(folder: Path, process: int) -> Beat | None:
    """Returns what a process last said, or None if it has said nothing yet."""
    for _ in range(3):
        try:
            return Beat(**json.loads((folder / f"{process}.json").read_text()))
        except (OSError, TypeError):  # not written yet, or by another version
            return None
        except ValueError:  # on a full disk it is written in its place
            time.sleep(0.002)
    return None


def report(folder: Path, attempt: str, process: int, how: str) -> None:
    """Says for a process that it failed, where it could not say so itself."""
    folder = folder / "processes" / name_of(attempt)
    if (beat := read(folder, process)) and not beat.ended:
        write(folder, dataclasses.replace(beat, doing=f"failed: it {how}", count=beat.count + 1))


def name_of(attempt: str) -> str:
    """Returns an attempt as the name of a folder."""
    return re.sub(r"[^\w.]+", "-", attempt).strip(".-")


def write(folder: Path, beat: Beat) -> None:
    """Writes what a process says, whole or not at all; on a full disk over what it said before, in its place."""
    text, file = json.dumps(dataclasses.asdict(beat)), folder / f"{beat.process}.json"
    part = folder / f".{beat.process}.{os.getpid()}.part"
    try:
        part.write_text(text.ljust(len(text) + ROOM))
        part.replace(file)
    except OSError as error:
        if error.errno not in FULL or not file.exists():
            raise
        part.unlink(missing_ok=True)
        size = file.stat().st_size
        if len(text) <= size:
            with file.open("r+b") as there:
                there.write(text.ljust(size).encode())


def _end(problem: Problem) -> NoReturn:
    """Ends this process from a thread: its main thread may wait in a collective for ever."""
    leave(LOST, f"error: {problem}", pause=PAUSE)


def _disagreement(what: str, said: Mapping[int, tuple[str, str]]) -> JaxparError:
    """Returns the error that names the processes that differ, and the first lines in which they do."""
    values = [value for _, value in said.values()]
    common = max(values, key=values.count)  # of as many, that of the first process
    odd = {name: value for name, value in said.values() if value != common}
    value = next(iter(odd.values()))
    lines = [
        line for line in difflib.unified_diff(common.splitlines(), value.splitlines(), lineterm="", n=0)
        if line[:1] in "+-" and line[:3] not in ("+++", "---")
    ]  # fmt: skip
    shown = "; ".join(f"{'it has' if line[0] == '+' else 'others have'} {line[1:]}" for line in lines[:4])
    return refuse(
        f"{', '.join(odd)} has another {what} than the other {len(said) - len(odd)}: {shown}"[:600],
        rule="all processes run the same program on the same job",
        fix="the same jaxpar, job file and model code on all hosts",
    )


def forget(folder: Path, attempt: str, keep: int = 3) -> None:
    """Deletes what earlier starts of a run left: all of this name, and of others but the latest."""
    folder = folder / "processes"
    if folder.is_dir():
        old = sorted(folder.iterdir(), key=lambda path: -path.stat().st_mtime)
        for path in {*old[keep:], folder / name_of(attempt)}:
            shutil.rmtree(path, ignore_errors=True)
