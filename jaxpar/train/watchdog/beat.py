"""Heartbeats: what a process says of itself, and the file it says it in."""

import dataclasses
import json
import os
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.files import FULL
from jaxpar.train.watchdog.digest import Crowd, Digest

ROOM = 2048  # bytes that a beat may grow by on a full disk
MOST = 1 << 20  # bytes of a beat: a few names and numbers


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """The heartbeat of a process.

    Attributes:
      process: Its number.
      host, pid: Where it is.
      count: How often it has said so: a stopped process no longer counts.
      place: How many things it has begun; all processes begin the same ones in the same order.
      step: The step it is in.
      doing: What it does, in words; `done` and `failed: ...` at its end.
      stuck: Seconds since it began that, by its own clock, without those in which it was stopped itself.
      longest: What it did to the most seconds that this took.
      fact: How many facts it has stated, and the hash of the last one.
      agreed: On how many facts all agree; only process 0 decides.
      stop: The signal that asked it to stop, or ""; of process 0, the one because of which all are asked to.
      hold: The step after which it waits until it knows where to stop, or 0.
      stop_at: The step after which all stop, or 0; only process 0 decides.
      below: What is known of the processes below it in the tree, or None.
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
        """Whether it has nothing more to say."""
        return self.doing == "done" or self.failed

    @property
    def failed(self) -> bool:
        """Whether it ended before the run did."""
        return self.doing.startswith("failed: ")

    def digest(self, silent: float = 0.0) -> Digest:
        """Returns what is known of this process alone, which has said nothing new for so many seconds."""
        alone = Crowd(
            place=self.place, count=1, stuck=self.stuck, names=(self.name,), doing=self.doing, activity=self.activity
        )
        index, value = self.fact
        reason = f"{self.name} ended: {self.doing.removeprefix('failed: ')}"
        return Digest(
            failed=(self.process, reason) if self.failed else None,
            silent=None if self.ended else (silent, self.name, self.activity),
            late=None if self.ended else alone,
            longest=self.longest,
            facts={f"{index}:{value}": (1, (self.process,))} if index else {},
            stop=self.stop,
            holding=int(self.hold > 0 or self.ended),
            hold=self.hold,
        )


def unknown(process: int) -> Heartbeat:
    """Returns what is known of a process that has said nothing yet."""
    return Heartbeat(process=process, host="unknown", pid=0)


class Files:
    """The folder in which processes find each other's beats.

    Args:
      folder: Of one attempt of a run; shared by all its processes.
    """

    def __init__(self, folder: Path):
        self.folder = folder
        folder.mkdir(parents=True, exist_ok=True)

    def read(self, process: int) -> Heartbeat | None:
        """Returns what a process last said, or None if it has said nothing yet."""
        return read(self.folder, process)

    def write(self, beat: Heartbeat) -> None:
        """Says what a process has to say."""
        write(self.folder, beat)

    def state(self, process: int, text: str) -> None:
        """Leaves the text of a fact where it can be compared, should its hash differ; not on a full disk."""
        file = self.folder / f"{process}.fact.txt"
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            if error.errno not in FULL:
                raise
            file.unlink(missing_ok=True)  # the hash is compared all the same: a text that is old would mislead

    def stated(self, process: int) -> str:
        """Returns the text of the last fact that a process stated; "" where it does not show in the folder yet."""
        file = self.folder / f"{process}.fact.txt"
        return file.read_text(encoding="utf-8") if file.exists() else ""


def read(folder: Path, process: int) -> Heartbeat | None:
    """Returns what a process last said, or None if it has said nothing yet."""
    for _ in range(3):
        try:
            said = json.loads(_bytes(f"{folder}/{process}.json"))
            below = said.pop("below")
            return Heartbeat(**said, below=None if below is None else Digest.parse(below))
        except (OSError, TypeError, KeyError):  # not written yet, or by another version
            return None
        except ValueError:  # on a full disk it is written in its place
            time.sleep(0.002)
    return None


def _bytes(path: str) -> bytes:
    """Returns a small file; `Path.read_bytes` takes as long as all the rest of a turn."""
    handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        return os.read(handle, MOST)
    finally:
        os.close(handle)


def write(folder: Path, beat: Heartbeat) -> None:
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
