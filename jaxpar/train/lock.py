"""The lock of a run folder: a second run in it would replace the metrics and delete checkpoints of the first.

    RUN/lock    its holder: host, pid, start time; its modification time is the holder's last heartbeat

The lock names its holder and is valid while the holder is alive. On the same machine, the holder's pid is looked up.
On another machine, its heartbeats count, by the clock of the shared file system: the new run watches the lock until
the holder touches it, or until it is `STALE` seconds old. The lock must be a regular file: a symbolic link may point to
the lock of another run, or nowhere.
"""

import json
import os
import socket
import stat
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from types import TracebackType

import pydantic

from jaxpar.errors import JaxparError, Problem, escape_control, refuse
from jaxpar.files import make_folder
from jaxpar.process_exit import exit_process
from jaxpar.units import show_seconds

BEAT = 5.0  # seconds between two heartbeats
STALE = 6 * BEAT  # seconds without a heartbeat after which a process on another machine counts as dead
MOST = 1 << 16  # bytes read from a lock at most; it holds a few names and numbers
RULE, FIX = "one run at a time writes into a run folder", "let one of both go on"


@dataclass(frozen=True, kw_only=True)
class Holder:
    """The process that holds a lock.

    Attributes:
      host, pid: Its host, and its process id there.
      since: Time at which it took the lock, in seconds since 1970.
      machine: Id that distinguishes machines and containers with the same host name; "" if the system has none.
      started: Start time of the process, which distinguishes it from a later process with the same pid.
    """

    __pydantic_config__ = pydantic.ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)

    host: str = field(default_factory=socket.gethostname)
    pid: int = field(default_factory=os.getpid)
    since: float = field(default_factory=time.time)
    machine: str = field(default_factory=lambda: _machine())
    started: str = field(default_factory=lambda: _start_time(os.getpid()))

    @property
    def name(self) -> str:
        """`host a, pid 12, for 3.0 min`."""
        return f"host {self.host}, pid {self.pid}, for {show_seconds(max(0.0, time.time() - self.since))}"

    @property
    def is_here(self) -> bool:
        """Whether the holder is on this machine, in the same pid namespace, so that its pid can be looked up."""
        ours = _machine()
        return bool(ours) and (self.host, self.machine) == (socket.gethostname(), ours)

    @property
    def lives(self) -> bool:
        """Whether the process still runs; only meaningful if `is_here`."""
        return bool(self.started) and _start_time(self.pid) == self.started


_HOLDER = pydantic.TypeAdapter(Holder)
_KINDS = {
    stat.S_IFLNK: "a link", stat.S_IFDIR: "a folder", stat.S_IFIFO: "a pipe", stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device", stat.S_IFBLK: "a device",
}  # fmt: skip


class Lock:
    """The lock of a run folder, a context manager.

    Args:
      folder: The run folder; it is created if it does not exist.
      say: Prints a line for the user, e.g. that a stale lock is broken.

    Raises:
      JaxparError: On entry, if another run holds the lock, RUN/lock is no regular file, or it cannot be written.
    """

    def __init__(self, folder: Path, say: Callable[[str], None]):
        self.folder, self.say, self.path = folder, say, folder / "lock"
        self.holder = Holder()
        self._closed = threading.Event()

    def __enter__(self) -> "Lock":
        self._was_there = self.folder.is_dir()
        make_folder(self.folder)
        while not self._take():
            self._break()
        threading.Thread(target=self._beat, name="jaxpar-lock", daemon=True).start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._closed.set()
        if read(self.path) == self.holder:
            self.path.unlink(missing_ok=True)
        if not self._was_there and self.folder.is_dir() and not any(self.folder.iterdir()):
            self.folder.rmdir()

    def _take(self) -> bool:
        try:
            handle = os.open(self.path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        except FileExistsError:
            return False
        except OSError as error:
            raise refuse(f"{self.path}: {error.strerror}", rule=RULE, fix="another run.dir") from error
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(asdict(self.holder), file)
        except OSError as error:  # on a full disk a file can be created, but not written
            self.path.unlink()
            raise refuse(f"{self.path}: {error.strerror}", rule=RULE, fix="free some, or another run.dir") from error
        return True

    def _break(self) -> None:
        """Removes a stale lock; raises if its holder is alive."""
        try:
            status = self.path.lstat()
        except FileNotFoundError:  # released in the meantime
            return
        if not stat.S_ISREG(status.st_mode):
            got = f"{self.path} is {_KINDS.get(stat.S_IFMT(status.st_mode), 'no file')}"
            raise refuse(got, rule="the lock of a run folder is a plain file", fix=f"mv {self.path} elsewhere")
        held, touched = read(self.path), status.st_mtime
        if held is not None and held.is_here:
            if held.lives:
                raise self._locked_error(held)
            why = "which is gone"
        else:
            quiet = max(0.0, self._now() - touched)
            if quiet < STALE:
                self.say(
                    f"{self.folder} is held by {_name(held)}: waiting for a sign of life of it, {STALE:g} s at most"
                )
            end = time.monotonic() + STALE - quiet
            while time.monotonic() < end:
                time.sleep(min(0.2, STALE / 20))
                try:
                    if self.path.lstat().st_mtime != touched:
                        raise self._locked_error(read(self.path) or held)
                except FileNotFoundError:
                    return
            why = f"which has given no sign of life for {max(quiet, STALE):.0f} s"
        if self._remove(status):
            self.say(f"{self.folder} was held by {_name(held)}, {why}: its lock is broken")

    def _remove(self, stale: os.stat_result) -> bool:
        """Removes a stale lock, unless another process that also found it stale did so first.

        Comparing and removing are two steps, so the file `lock.breaking` guards them: without it, a slow process could
        remove the new lock of a process that has already replaced the stale one.
        """
        guard = self.path.with_name("lock.breaking")
        try:
            os.close(os.open(guard, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644))
        except FileExistsError:
            time.sleep(min(0.2, STALE / 20))
            with suppress(FileNotFoundError):
                if self._now() - guard.lstat().st_mtime > STALE:  # its process died here
                    guard.unlink()
            return False
        except OSError as error:
            raise refuse(f"{guard}: {error.strerror}", rule=RULE, fix="another run.dir") from error
        try:
            now = self.path.lstat()
            if (now.st_ino, now.st_mtime_ns) != (stale.st_ino, stale.st_mtime_ns):
                return False
            self.path.unlink()
            return True
        except FileNotFoundError:
            return False
        except OSError as error:  # the lock belongs to another user
            raise refuse(f"{self.path}: {error.strerror}", rule=RULE, fix="another run.dir") from error
        finally:
            guard.unlink(missing_ok=True)

    def _now(self) -> float:
        """Returns the time by the clock of the file system: the modification time of a file touched now."""
        probe = self.path.with_name(f"lock.{uuid.uuid4().hex}")
        try:
            probe.touch()
            return probe.stat().st_mtime
        except OSError as error:  # the lock exists, but the folder is read-only
            raise refuse(f"{self.folder}: {error.strerror}", rule=RULE, fix="another run.dir") from error
        finally:
            with suppress(OSError):
                probe.unlink(missing_ok=True)

    def _locked_error(self, held: Holder | None) -> JaxparError:
        fix = "another run.dir, or wait until that run has ended"
        return refuse(f"another run is at work in {self.folder}: {_name(held)}", rule=RULE, fix=fix)

    def _beat(self) -> None:
        told = False
        while not self._closed.wait(BEAT):
            try:
                if (found := read(self.path)) not in (None, self.holder):
                    # anything that this run writes from now on would corrupt the files of the other run
                    exit_process(1, f"error: {Problem(f'{self.folder} was taken over by {_name(found)}', RULE, FIX)}")
                os.utime(self.path)
            except OSError as error:
                if isinstance(error, FileNotFoundError) and self._take_again():
                    continue
                if not (told or self._closed.is_set()):
                    self.say(f"{self.path}: {error.strerror}; another run may begin to write there")
                told = True

    def _take_again(self) -> bool:
        """Takes the lock again after the run folder was deleted and recreated. Returns whether that worked."""
        try:
            return self.folder.is_dir() and self._take()
        except JaxparError:
            return False


def read(path: Path) -> Holder | None:
    """Returns the holder of a lock, or None if the file does not name one."""
    try:
        with path.open("rb") as file:
            text = file.read(MOST)
        holder = _HOLDER.validate_json(text)
        return holder if json.loads(text).keys() == asdict(holder).keys() else None  # jaxpar writes all fields
    except (OSError, ValueError):  # deleted, half written, by another version, or not by jaxpar
        return None


def _name(holder: Holder | None) -> str:
    return escape_control(holder.name) if holder else "a process that did not say its name"


def _machine() -> str:
    """Returns the boot id of this machine and its pid namespace, or "" on systems without /proc."""
    try:
        return f"{Path('/proc/sys/kernel/random/boot_id').read_text().strip()} {os.readlink('/proc/self/ns/pid')}"
    except OSError:
        return ""


def _start_time(pid: int) -> str:
    """Returns the start time of a process in clock ticks since boot, or "" if it does not exist or is a zombie."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if words[0] in "ZX" else words[19]
