"""Runs checks with a time limit, and checks this machine: disk, memory, process limits, file clock."""

import os
import resource
import tempfile
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from jaxpar.units import show_bytes, show_seconds


@dataclass(frozen=True, slots=True)
class Finding:
    """The result of one check.

    Attributes:
      what: The subject, in a word or two.
      state: ok; warning: a run works, but slower or less safely; problem: a run fails to start or to finish.
      text: The observation, with its numbers.
      fix: The remedy, "" if all is well.
    """

    what: str
    state: Literal["ok", "warning", "problem"]
    text: str
    fix: str = ""

    def __str__(self) -> str:
        line = f"{self.state:<8} {self.what:<12} {self.text}"
        return f"{line}\n{'':21} fix: {self.fix}" if self.fix else line


def with_time_limit(what: str, check: Callable[[], Iterable[Finding]], *, seconds: float, fix: str) -> list[Finding]:
    """Runs a check with a time limit; returns a finding about the hang if it hangs.

    Args:
      what: The subject of that finding.
      check: A function that may hang, e.g. on a dead file server or name server.
      seconds: The time limit.
      fix: The remedy to show if the check exceeds the limit.
    """
    results: list[list[Finding]] = []
    thread = threading.Thread(target=lambda: results.append(list(check())), daemon=True)
    thread.start()
    thread.join(seconds)
    return results[0] if results else [Finding(what, "problem", f"no answer within {seconds:g} s", fix)]


# Checks of disk, shared memory, process limits and file clock of this machine.

SHARED_MEMORY = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FILES = 4096  # open files that a run with many shards and sockets may need
SKEW = 1.0  # seconds; jaxpar orders events by file times


def nearest_folder(path: Path) -> Path:
    """Returns the folder itself or its nearest existing ancestor."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk(folder: Path, *, state: int = 0, checkpoints: int = 1) -> Finding:
    """Compares the free space at a run folder with the size of its checkpoints.

    Args:
      folder: The run folder; need not exist.
      state: Bytes of one checkpoint, 0 if unknown.
      checkpoints: Checkpoints that coexist, including the one being written.
    """
    ancestor = nearest_folder(folder)
    filesystem = os.statvfs(ancestor)
    free, need = filesystem.f_bavail * filesystem.f_frsize, state * checkpoints
    text = f"{show_bytes(free)} free in {ancestor}"
    if state:
        text += f", {checkpoints} checkpoints of {show_bytes(state)} take {show_bytes(need)}"
    fix = "another run.dir, or a smaller checkpoint.keep_last" if state else "another folder, or make room"
    if free < max(need, 64 * 2**20):
        return Finding("disk", "problem", text, fix)
    if free < max(2 * need, 2**30):
        return Finding("disk", "warning", text, fix)
    return Finding("disk", "ok", text)


def folder_clock(folder: Path) -> Finding:
    """Writes a file into the run folder and compares its timestamp with this machine's clock."""
    ancestor = nearest_folder(folder)
    try:
        start = time.time()
        with tempfile.NamedTemporaryFile(dir=ancestor, prefix=".jaxpar-doctor-") as file:
            file.write(b"clock")
            file.flush()
            stamped = os.fstat(file.fileno()).st_mtime
        end = time.time()
    except OSError as error:
        return Finding("run folder", "problem", f"nothing can be written into {ancestor}: {error.strerror}",
            "run.dir = a folder that you may write to")  # fmt: skip
    skew = max(0.0, start - stamped, stamped - end)
    text = f"a file in {ancestor} is stamped {show_seconds(skew)} off this clock"
    if skew > SKEW:
        return Finding("run folder", "warning", text, "set the clocks (chronyc tracking, timedatectl)")
    return Finding("run folder", "ok", f"can be written; {text}; of several hosts, all must see this folder")


def shared_memory(path: Path = SHARED_MEMORY, *, gpus: bool) -> Finding:
    """Checks the free space of /dev/shm, which GPUs of one machine use to exchange data."""
    if not path.is_dir():
        return Finding("/dev/shm", "warning" if gpus else "ok", f"no {path}", "mount it as tmpfs" if gpus else "")
    filesystem = os.statvfs(path)
    free = filesystem.f_bavail * filesystem.f_frsize
    text = f"{show_bytes(free)} free of {show_bytes(filesystem.f_blocks * filesystem.f_frsize)}"
    if free < 16 * 2**20 or (gpus and free < 512 * 2**20):
        fix = "docker run --shm-size=16g, or an emptyDir of medium Memory in a pod; rm what is left over there"
        return Finding("/dev/shm", "problem" if gpus else "warning", text, fix)
    return Finding("/dev/shm", "ok", text)


def open_files() -> Finding:
    """Checks the limit of open files per process."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} at once (ulimit -n), {_limit(hard)} at most"
    if soft != resource.RLIM_INFINITY and soft < FILES:
        state = "problem" if soft < 256 else "warning"
        return Finding("open files", state, text, f"ulimit -n {FILES if hard < 0 else min(max(FILES, soft), hard)}")
    return Finding("open files", "ok", text)


def core_dumps() -> Finding:
    """Checks whether an aborted process dumps its memory to disk."""
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        return Finding("core dumps", "ok", "off")
    size = "of any size" if soft == resource.RLIM_INFINITY else f"up to {show_bytes(soft)}"
    return Finding("core dumps", "ok", f"on, {size}: a process that is aborted may write its memory to disk")


def cores(root: Path = CGROUP, *, simulate: int = 0) -> Finding:
    """Compares the visible cores with the CPU quota of the container."""
    core_count = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{core_count} of {os.cpu_count()}" + f" for {simulate} simulated devices" * bool(simulate)
    quota = cpu_quota(root)
    if quota and quota < 0.9 * core_count:
        text += f"; the container may use {quota:.3g} of them, so threads wait for each other"
        return Finding("cores", "warning", text, f"taskset -c 0-{max(1, int(quota)) - 1}, or a larger CPU limit")
    return Finding("cores", "ok", text)


def cpu_quota(root: Path) -> float:
    """Returns the CPU quota of a control group (version 2 or 1) in cores, 0 if unlimited."""
    try:
        if (file := root / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return 0.0 if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):  # no readable control groups: no known limit
        return 0.0


def threads(root: Path = CGROUP, *, simulate: int = 0) -> Finding:
    """Checks the limit of threads; each simulated device has eight."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft != resource.RLIM_INFINITY else []
    try:
        text = (root / "pids.max").read_text().strip()
        limits += [int(text)] if text.isdecimal() else []
    except OSError:
        pass  # no known limit
    need = 256 + 16 * simulate
    if limits and min(limits) < need:
        return Finding("threads", "problem", f"at most {min(limits)}, a run takes about {need}", "ulimit -u 4096, or a "
            "larger pids limit of the container")  # fmt: skip
    return Finding("threads", "ok", f"at most {min(limits)}" if limits else "no limit")


def huge_pages(path: Path = HUGE, *, simulate: int = 0) -> Finding:
    """Checks transparent huge pages, which speed up simulated devices."""
    try:
        mode = path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding("huge pages", "ok", "this system has none")
    if mode == "never" and simulate:
        return Finding(
            "huge pages", "warning", "never: steps on simulated devices are slower", f"echo madvise > {path}"
        )
    return Finding("huge pages", "ok", mode)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
