"""Heartbeats: the state that a process reports, and the file it reports it in."""

import dataclasses
import json
import os
import socket
import sys
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.errors import Problem
from jaxpar.files import FULL
from jaxpar.train.watchdog.digest import Digest, ProcessGroup

ROOM = 2048  # spare bytes in a file: on a full disk a heartbeat is overwritten in place, and may grow by so many
MOST = 1 << 20  # bytes of a beat: a few names and numbers


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The heartbeat of a process.

    Attributes:
      process: Its number.
      host, pid: Its host and its process id there.
      count: Number of this heartbeat: it no longer grows when the process is stopped.
      place: Number of activities it has begun; all processes begin the same ones in the same order.
      step: The step it is in.
      doing: Its activity in words; `done` or `failed: ...` at its end.
      stuck: Seconds since it began that activity, by its own clock, without time in which it was stopped itself.
      longest: Activity to the most seconds that it took.
      fact: Number of facts that it has stated, and the hash of the last one.
      agreed: Number of facts that all agree on; set by process 0 alone.
      stop: The signal that asked it to stop, or ""; in process 0, the signal that all are asked to stop for.
      hold: The step after which it waits until it knows the last step, or 0.
      stop_at: The step after which all stop, or 0; set by process 0 alone.
      below: Digest of the processes below it in the tree, or None.
    """

    process: int
    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    count: int = 0
    place: int = 0
    step: int = 0
    doing: str = "starting"
    stuck: float = 0.0
    longest: Mapping[str, float] = field(default_factory=dict)
    fact: tuple[int, str] = (0, "")
    agreed: int = 0
    stop: str = ""
    hold: int = 0
    stop_at: int = 0
    below: Digest | None = None

    @property
    def name(self) -> str:
        """`process 3 (host a, pid 12)`."""
        return f"process {self.process} (host {self.host}, pid {self.pid})"

    @property
    def activity(self) -> str:
        """`training (step 7)`."""
        return f"{self.doing} (step {self.step})" if self.step else self.doing

    @property
    def ended(self) -> bool:
        """Whether this is its last heartbeat."""
        return self.doing == "done" or self.failed

    @property
    def failed(self) -> bool:
        """Whether it ended before the run did."""
        return self.doing.startswith("failed: ")

    def digest(self, silent: float = 0.0) -> Digest:
        """Returns the digest of this process alone, whose heartbeat has not changed for `silent` seconds."""
        alone = ProcessGroup(
            place=self.place, count=1, stuck=self.stuck, names=(self.name,), doing=self.doing, activity=self.activity
        )
        index, value = self.fact
        reason = f"{self.name} ended: {self.doing.removeprefix('failed: ')}"
        return Digest(
            failed=(self.process, reason) if self.failed else None,
            # a process that has ended is neither silent nor late: it has nothing more to do
            silent=None if self.ended else (silent, self.name, self.activity),
            late=None if self.ended else alone,
            longest=self.longest,
            facts={f"{index}:{value}": (1, (self.process,))} if index else {},
            stop=self.stop,
            holding=int(self.hold > 0 or self.ended),
            hold=self.hold,
        )


def unknown(process: int) -> Heartbeat:
    """Returns the heartbeat that stands for a process from which none has come yet."""
    return Heartbeat(process=process, host="unknown", pid=0)


class Files:
    """The folder in which processes find each other's heartbeats.

    Args:
      folder: Of one attempt of a run; shared by all its processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._device = folder.stat().st_dev

    def read(self, process: int) -> Heartbeat | None:
        """Returns the last heartbeat of a process, or None if it has written none yet."""
        return read(self.folder, process)

    def write(self, beat: Heartbeat) -> None:
        """Writes the heartbeat of a process; in a folder made anew, if somebody has deleted it."""
        try:
            write(self.folder, beat)
        except FileNotFoundError:
            self._make_anew()
            write(self.folder, beat)

    def state(self, process: int, text: str) -> None:
        """Writes the text of a fact, which is read only if its hash differs; on a full disk it is left out."""
        file = self.folder / f"{process}.fact.txt"
        try:
            file.write_text(text, encoding="utf-8")
        except FileNotFoundError:
            self._make_anew()
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            if error.errno not in FULL:
                raise
            file.unlink(missing_ok=True)  # the hash is compared all the same: a text that is old would mislead

    def _make_anew(self) -> None:
        """Makes a folder that was deleted again; the caller handles the error of one that is gone with its file system.

        A run folder is deleted by mistake, and its state is worth more than before: it is the only one that is left.
        So the run goes on, and its processes watch each other as they did.
        """
        there = next(path for path in self.folder.absolute().parents if path.exists())
        if there.stat().st_dev != self._device:  # not mounted any more: what is made below would be on another disk
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, ValueError):  # a stream that is closed must not end the watchdog
            print(
                f"warning: {self.folder} was deleted, and is made anew: training goes on, and saves there when it is "
                "due; if all of the run folder was deleted, its checkpoints and metrics are lost",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def stated(self, process: int) -> str:
        """Returns the text of the last fact that a process stated; "" where it does not show in the folder yet."""
        file = self.folder / f"{process}.fact.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""


def read(folder: Path, process: int) -> Heartbeat | None:
    """Returns the last heartbeat of a process, or None if it has written none yet."""
    # tried again: only a heartbeat that was overwritten in place, on a full disk, can be met half written
    for _ in range(3):
        try:
            said = json.loads(_bytes(f"{folder}/{process}.json"))
            below = said.pop("below")
            return Heartbeat(**said, below=None if below is None else Digest.parse(below))
        except (OSError, TypeError, KeyError):
            return None  # not written yet, or by another version of jaxpar: its silence will show
        except ValueError:
            time.sleep(0.002)
    return None


def _bytes(path: str) -> bytes:
    """Returns the bytes of a small file, by system calls: `Path.read_bytes` takes as long as the rest of a turn."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, MOST)
    finally:
        os.close(handle)


def write(folder: Path, beat: Heartbeat) -> None:
    """Writes a heartbeat, by an atomic rename; on a full disk over the one before, in place.

    Without that a full disk would silence all processes at once, and each would end the run because of another.
    """
    text, file = json.dumps(dataclasses.asdict(beat)), folder / f"{beat.process}.json"
    part = folder / f".{beat.process}.{os.getpid()}.part"
    try:
        part.write_text(text.ljust(len(text) + ROOM))  # blanks after JSON are ignored by its reader
        part.replace(file)
    except OSError as error:
        if error.errno not in FULL or not file.exists():
            raise
        part.unlink(missing_ok=True)
        size = file.stat().st_size
        if len(text) <= size:
            with file.open("r+b") as there:
                there.write(text.ljust(size).encode())


# Makes a run's processes agree on the name of the attempt, and checks that they share a run folder.
#
#     process 0   makes RUN/processes/ATTEMPT, with a name that no attempt had before, and sends the name
#     the others  look for that folder: one that does not see it has another run folder, on a disk of its own
#
# So a supervisor that was restarted joins the attempt that the others begin, however many it has counted
# itself; and no process takes the files of an earlier attempt for heartbeats.

SEEN = 10.0  # seconds within which a new folder shows on all hosts, where a file server is slow
FIX = "run.dir = a folder on a file system that all hosts share, at the same path: NFS, Lustre, a mounted bucket"


def begin_attempt(run: Path) -> str:
    """Makes the folder of a new attempt, and returns its name."""
    host = socket.gethostname()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}-{os.getpid()}-{time.monotonic_ns()}"
    (run / "processes" / name).mkdir(parents=True)
    return name


def find_attempt(run: Path, attempt: str, *, process: int, seconds: float = SEEN) -> Problem | None:
    """Returns a problem if this process does not see the run folder of process 0; looks for `seconds`."""
    until = time.monotonic() + seconds
    while not (run / "processes" / attempt).is_dir():
        if time.monotonic() > until:
            got = f"process {process} on {socket.gethostname()} does not see what process 0 writes into {run.resolve()}"
            return Problem(got, "all processes of a run share its folder: its checkpoints and signs of life", FIX)
        time.sleep(0.1)
    return None
