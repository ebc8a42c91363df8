"""Disk, shared memory, limits and clocks of this machine."""

import os
import resource
import tempfile
import time
from pathlib import Path

from jaxpar.job.doctor.finding import Finding
from jaxpar.units import show_bytes, show_seconds

SHARED = Path("/dev/shm")
CGROUP = Path("/sys/fs/cgroup")
HUGE = Path("/sys/kernel/mm/transparent_hugepage/enabled")
FILES = 4096  # open files that a run with many shards and sockets may want
SKEW = 1.0  # seconds; file times of a folder are taken for an order of events


def nearest_folder(path: Path) -> Path:
    """Returns the folder, or the innermost one above it that is there."""
    path = path.absolute()
    return next(folder for folder in (path, *path.parents) if folder.is_dir())


def disk(folder: Path, *, state: int = 0, kept: int = 1) -> Finding:
    """Compares the free space for a run's folder with the size of its checkpoints.

    Args:
      folder: The run folder, there already or not.
      state: Bytes of one checkpoint, 0 where that is not known.
      kept: Checkpoints that are there at once, with the one that is being written.
    """
    at = nearest_folder(folder)
    found = os.statvfs(at)
    free, need = found.f_bavail * found.f_frsize, state * kept
    text = f"{show_bytes(free)} free in {at}"
    if state:
        text += f", {kept} checkpoints of {show_bytes(state)} take {show_bytes(need)}"
    fix = "another run.dir, or a smaller checkpoint.keep_last" if state else "another folder, or make room"
    if free < max(need, 64 * 2**20):
        return Finding("disk", "problem", text, fix)
    if free < max(2 * need, 2**30):
        return Finding("disk", "warning", text, fix)
    return Finding("disk", "ok", text)


def folder_clock(folder: Path) -> Finding:
    """Writes a file into the run folder and compares the time it gets with this machine's clock."""
    at = nearest_folder(folder)
    try:
        before = time.time()
        with tempfile.NamedTemporaryFile(dir=at, prefix=".jaxpar-doctor-") as file:
            file.write(b"clock")
            file.flush()
            stamped = os.fstat(file.fileno()).st_mtime
        after = time.time()
    except OSError as error:
        return Finding("run folder", "problem", f"nothing can be written into {at}: {error.strerror}",
            "run.dir = a folder that is yours")  # fmt: skip
    off = max(0.0, before - stamped, stamped - after)
    text = f"a file in {at} is stamped {show_seconds(off)} off this clock"
    if off > SKEW:
        return Finding("run folder", "warning", text, "set the clocks (chronyc tracking, timedatectl)")
    return Finding("run folder", "ok", f"can be written; {text}; of several hosts, all must see this folder")


def shared_memory(path: Path = SHARED, *, gpus: bool) -> Finding:
    """Looks at /dev/shm, through which GPUs of one machine exchange data."""
    if not path.is_dir():
        return Finding("/dev/shm", "warning" if gpus else "ok", f"no {path}", "mount it as tmpfs" if gpus else "")
    found = os.statvfs(path)
    free = found.f_bavail * found.f_frsize
    text = f"{show_bytes(free)} free of {show_bytes(found.f_blocks * found.f_frsize)}"
    if free < 16 * 2**20 or (gpus and free < 512 * 2**20):
        fix = "docker run --shm-size=16g, or an emptyDir of medium Memory in a pod; rm what is left over there"
        return Finding("/dev/shm", "problem" if gpus else "warning", text, fix)
    return Finding("/dev/shm", "ok", text)


def open_files() -> Finding:
    """Looks at how many files a process may open."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    text = f"{_limit(soft)} at once (ulimit -n), {_limit(hard)} at most"
    if soft != resource.RLIM_INFINITY and soft < FILES:
        state = "problem" if soft < 256 else "warning"
        return Finding("open files", state, text, f"ulimit -n {FILES if hard < 0 else min(max(FILES, soft), hard)}")
    return Finding("open files", "ok", text)


def core_dumps() -> Finding:
    """Looks at whether a process that XLA ends leaves a file as large as its memory."""
    soft, _ = resource.getrlimit(resource.RLIMIT_CORE)
    if soft == 0:
        return Finding("core dumps", "ok", "off")
    size = "of any size" if soft == resource.RLIM_INFINITY else f"up to {show_bytes(soft)}"
    return Finding("core dumps", "ok", f"on, {size}: a process that is aborted may write its memory to disk")


def cores(root: Path = CGROUP, *, simulate: int = 0) -> Finding:
    """Compares the cores that programs see with those that a container may use."""
    seen = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    text = f"{seen} of {os.cpu_count()}" + f" for {simulate} simulated devices" * bool(simulate)
    share = allowed(root)
    if share and share < 0.9 * seen:
        text += f"; the container may use {share:.3g} of them, so threads wait for each other"
        return Finding("cores", "warning", text, f"taskset -c 0-{max(1, int(share)) - 1}, or a larger CPU limit")
    return Finding("cores", "ok", text)


def allowed(root: Path) -> float:
    """Returns how many cores a control group may use, 0 where it may use all: version 2, then version 1."""
    try:
        if (file := root / "cpu.max").exists():
            quota, period = file.read_text().split()
        else:
            quota, period = ((root / "cpu" / f"cpu.cfs_{name}_us").read_text() for name in ("quota", "period"))
        return 0.0 if quota == "max" or int(quota) <= 0 else int(quota) / int(period)
    except (OSError, ValueError):  # no control groups, or none that we may read: then no limit that we know of
        return 0.0


def threads(root: Path = CGROUP, *, simulate: int = 0) -> Finding:
    """Looks at how many threads may be started; simulated devices have eight each."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    limits = [soft] if soft != resource.RLIM_INFINITY else []
    try:
        text = (root / "pids.max").read_text().strip()
        limits += [int(text)] if text.isdecimal() else []
    except OSError:
        pass  # as above
    need = 256 + 16 * simulate
    if limits and min(limits) < need:
        return Finding("threads", "problem", f"at most {min(limits)}, a run takes about {need}", "ulimit -u 4096, or a "
            "larger pids limit of the container")  # fmt: skip
    return Finding("threads", "ok", f"at most {min(limits)}" if limits else "no limit")


def huge_pages(path: Path = HUGE, *, simulate: int = 0) -> Finding:
    """Looks at transparent huge pages, which simulated devices gain from."""
    try:
        chosen = path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return Finding("huge pages", "ok", "this system has none")
    if chosen == "never" and simulate:
        return Finding(
            "huge pages", "warning", "never: steps on simulated devices are slower", f"echo madvise > {path}"
        )
    return Finding("huge pages", "ok", chosen)


def _limit(value: int) -> str:
    return "unlimited" if value == resource.RLIM_INFINITY else str(value)
