"""Heartbeats: the state that a process reports, and the file that it writes it to."""

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

ROOM = 2048  # padding in bytes: on a full disk a heartbeat is overwritten in place, and may grow by this much
MOST = 1 << 20  # bytes read from a heartbeat file at most; it holds a few names and numbers


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The heartbeat of a process.

    Attributes:
      process: Number of the process.
      host, pid: Its host name, and its process id on that host.
      count: Number of this heartbeat; it stops growing if the process is stopped.
      place: Number of activities that it has begun; all processes begin the same activities in the same order.
      step: The step that it is in.
      doing: The name of its activity; `done` or `failed: ...` at its end.
      stuck: Seconds since that activity began, by its own clock, without time during which the process was stopped.
      longest: The longest time that each activity has taken, in seconds.
      fact: Number of facts that it has stated, and the hash of the last one.
      agreed: Number of facts that all processes agree on; only process 0 sets it.
      stop: The signal that asked it to stop, or ""; in process 0, the signal for which all stop.
      hold: The step after which it waits until it knows the last step, or 0.
      stop_at: The step after which all stop, or 0; only process 0 sets it.
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
        """Whether this is the last heartbeat of the process."""
        return self.doing == "done" or self.failed

    @property
    def failed(self) -> bool:
        """Whether the process ended before the run did."""
        return self.doing.startswith("failed: ")

    def digest(self, silent: float = 0.0) -> Digest:
        """Returns the digest of this process alone; its heartbeat has not changed for `silent` seconds."""
        alone = ProcessGroup(
            place=self.place, count=1, stuck=self.stuck, names=(self.name,), doing=self.doing, activity=self.activity
        )
        index, value = self.fact
        reason = f"{self.name} ended: {self.doing.removeprefix('failed: ')}"
        return Digest(
            failed=(self.process, reason) if self.failed else None,
            # a process that has ended has nothing more to do, so it is neither silent nor late
            silent=None if self.ended else (silent, self.name, self.activity),
            late=None if self.ended else alone,
            longest=self.longest,
            facts={f"{index}:{value}": (1, (self.process,))} if index else {},
            stop=self.stop,
            holding=int(self.hold > 0 or self.ended),
            hold=self.hold,
        )


def unknown(process: int) -> Heartbeat:
    """Returns a placeholder for a process whose first heartbeat has not arrived."""
    return Heartbeat(process=process, host="unknown", pid=0)


class Files:
    """The folder with the heartbeat files of all processes.

    Args:
      folder: The folder of one attempt of a run, shared by all its processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)
        self._device = folder.stat().st_dev

    def read(self, process: int) -> Heartbeat | None:
        """Returns the last heartbeat of a process, or None if it has written none yet."""
        return read(self.folder, process)

    def write(self, beat: Heartbeat) -> None:
        """Writes the heartbeat of a process; recreates the folder if it was deleted."""
        try:
            write(self.folder, beat)
        except FileNotFoundError:
            self._make_anew()
            write(self.folder, beat)

    def state(self, process: int, text: str) -> None:
        """Writes the text of a fact, which others read only if its hash differs; writes nothing on a full disk."""
        file = self.folder / f"{process}.fact.txt"
        try:
            file.write_text(text, encoding="utf-8")
        except FileNotFoundError:
            self._make_anew()
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            if error.errno not in FULL:
                raise
            file.unlink(missing_ok=True)  # an outdated text would mislead; hashes are still compared

    def _make_anew(self) -> None:
        """Recreates the deleted folder, unless its file system is unmounted: then the caller's write fails again.

        A run folder is usually deleted by mistake, and the state in memory is then the only copy left. So the run goes
        on, and its processes still watch each other.
        """
        there = next(path for path in self.folder.absolute().parents if path.exists())
        if there.stat().st_dev != self._device:  # unmounted: a new folder would be on another disk
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        with suppress(OSError, ValueError):  # a closed stderr must not end the watchdog
            print(
                f"warning: {self.folder} was deleted, and is made anew: training goes on, and saves there when it is "
                "due; if all of the run folder was deleted, its checkpoints and metrics are lost",
                file=sys.stderr, flush=True,
            )  # fmt: skip

    def read_fact(self, process: int) -> str:
        """Returns the text of the last fact that a process stated; "" if its file is not visible yet."""
        file = self.folder / f"{process}.fact.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""


def read(folder: Path, process: int) -> Heartbeat | None:
    """Returns the last heartbeat of a process, or None if it has written none yet."""
    # retries, as a heartbeat that is overwritten in place (on a full disk) may be half written
    for _ in range(3):
        try:
            said = json.loads(_bytes(f"{folder}/{process}.json"))
            below = said.pop("below")
            return Heartbeat(**said, below=None if below is None else Digest.parse(below))
        except (OSError, TypeError, KeyError):
            return None  # not written yet, or by another jaxpar version: the process will count as silent
        except ValueError:
            time.sleep(0.002)
    return None


def _bytes(path: str) -> bytes:
    """Reads a small file by system calls: `Path.read_bytes` takes as long as the rest of a turn."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, MOST)
    finally:
        os.close(handle)


def write(folder: Path, beat: Heartbeat) -> None:
    """Writes a heartbeat by an atomic rename; on a full disk, overwrites the previous one in place.

    Otherwise a full disk would silence all processes at once, and each would end the run because of the others.
    """
    text, file = json.dumps(dataclasses.asdict(beat)), folder / f"{beat.process}.json"
    part = folder / f".{beat.process}.{os.getpid()}.part"
    try:
        part.write_text(text.ljust(len(text) + ROOM))  # JSON parsers ignore trailing blanks
        part.replace(file)
    except OSError as error:
        if error.errno not in FULL or not file.exists():
            raise
        part.unlink(missing_ok=True)
        size = file.stat().st_size
        if len(text) <= size:
            with file.open("r+b") as there:
                there.write(text.ljust(size).encode())


# All processes of a run agree on the name of the attempt, and check that they share the run folder.
#
#     process 0        creates RUN/processes/ATTEMPT, with a new unique name, and sends the name to the others
#     other processes  look for that folder; a process that does not see it has a different run folder
#
# So a restarted supervisor joins the attempt of the others, whatever its own count of attempts, and no process
# mistakes the files of an earlier attempt for heartbeats.

SEEN = 10.0  # seconds until a new folder is visible on all hosts, even on a slow file server
FIX = "run.dir = a folder on a file system that all hosts share, at the same path: NFS, Lustre, a mounted bucket"


def begin_attempt(run: Path) -> str:
    """Creates the folder of a new attempt, and returns its name."""
    host = socket.gethostname()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}-{os.getpid()}-{time.monotonic_ns()}"
    (run / "processes" / name).mkdir(parents=True)
    return name


def find_attempt(run: Path, attempt: str, *, process: int, seconds: float = SEEN) -> Problem | None:
    """Returns a problem if this process does not see the attempt's folder within `seconds`."""
    until = time.monotonic() + seconds
    while not (run / "processes" / attempt).is_dir():
        if time.monotonic() > until:
            got = f"process {process} on {socket.gethostname()} does not see what process 0 writes into {run.resolve()}"
            return Problem(got, "all processes of a run share its folder, for checkpoints and heartbeats", FIX)
        time.sleep(0.1)
    return None
