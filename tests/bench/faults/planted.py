"""The faults that are planted in a run, and whether its processes detect them in time and by name."""

import os
import re
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import STOPPED, refuse
from jaxpar.measure.record import where
from jaxpar.mesh.devices import simulate

from ..faults.run import LATEST, PROCESSES, Processes, started


@dataclass(frozen=True)
class Detection:
    """Whether and when the processes of a run detected a planted fault.

    Attributes:
      fault: Its name.
      seconds: Seconds until the last other process had ended.
      within: Seconds within which it had to.
      named: Whether each of them named the process at fault.
      said: The message of one of them.
    """

    fault: str
    seconds: float
    within: float
    named: bool
    said: str

    @property
    def holds(self) -> bool:
        """Whether it was found in time and named."""
        return self.named and self.seconds <= self.within


def send(timeout: float, number: signal.Signals, process: int) -> Detection:
    """Sends a signal to one process of a run that trains."""
    with started(timeout) as run:
        run.wait_for_training()
        run.children[process].send_signal(number)
        return _found(run, f"{number.name} to process {process}", process, timeout)


def killed(timeout: float, process: int) -> Detection:
    """Kills one process of a run that `jaxpar launch` watches: Gloo ends the others without a word."""
    with started(timeout, launched=True) as run:
        run.wait_for_training()
        begin = time.monotonic()
        os.kill(run.pid(process), signal.SIGKILL)
        run.wait_for_end(within=3 * timeout + 20)
        seconds = time.monotonic() - begin
        said = next((line for line in run.output(0).splitlines() if line.startswith("launch: process")), "")
        named = f"process {process} (host " in said and "SIGKILL" in said
        return Detection(f"SIGKILL to process {process}", seconds, timeout + 5, named, said)


def late(timeout: float) -> Detection:
    """Lets one process read a batch for ever."""
    with started(timeout, plants={1: "late"}) as run:
        run.wait_for_training(25)
        return _found(run, "process 1 reads a batch for ever", 1, timeout)


def corrupt(timeout: float) -> Detection:
    """Gives one process a batch that holds no numbers."""
    with started(timeout, plants={1: "corrupt"}) as run:
        run.wait_for_training(25)
        return _found(run, "process 1 reads a corrupt batch", 1, timeout)


def nan(timeout: float) -> Detection:
    """Makes the loss of a step infinite; the error must name the step."""
    with started(timeout, plants=dict.fromkeys(range(PROCESSES), "nan")) as run:
        run.wait_for_training(25)
        begin = time.monotonic()
        ended = run.wait_for_end(within=3 * timeout + 20)
        said = [next((x for x in run.output(p).splitlines() if x.startswith("error: ")), "") for p in run.children]
        named = len(ended) == len(run.children) and all("step 31" in text for text in said)
        return Detection("the loss of step 31 is infinite", time.monotonic() - begin, timeout + 5, named, said[0])


def full_disk(timeout: float) -> Detection:
    """Fills the disk that a run saves to, between two saves; it says so, trains on, and saves when there is room."""
    often = {process: ["checkpoint.every=50"] for process in range(PROCESSES)}
    with small_disk() as disk, started(timeout, words=often, run_in=disk) as run:
        run.wait_for_training()
        begin = time.monotonic()
        while not (disk / "checkpoints" / "000050").exists() and time.monotonic() - begin < LATEST:
            time.sleep(0.01)
        ballast = disk / "ballast"
        ballast.write_bytes(bytes(max(0, shutil.disk_usage(disk).free - 4096)))
        begin = time.monotonic()
        while "is full" not in run.output(0) and time.monotonic() - begin < 3 * timeout:
            time.sleep(0.02)
        seconds, before = time.monotonic() - begin, run.step()
        ballast.unlink()
        while not (later := newer(disk, before)) and time.monotonic() - begin < 3 * timeout + 40:
            time.sleep(0.05)
        said = next((line for line in run.output(0).splitlines() if "is full" in line), run.output(0)[-300:])
        goes_on = later and all(child.poll() is None for child in run.children.values())
        return Detection("the disk fills up", seconds, timeout + 5, goes_on and "is full" in said, said)


def newer(folder: Path, step: int) -> bool:
    """Returns whether there is a checkpoint of a later step."""
    return any(path.name.isdigit() and int(path.name) > step for path in (folder / "checkpoints").iterdir())


@contextmanager
def small_disk() -> Iterator[Path]:
    """Mounts a file system of a megabyte.

    Raises:
      JaxparError: If this user may not.
    """
    with tempfile.TemporaryDirectory() as name:
        mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", name]
        done = subprocess.run(mount, capture_output=True, text=True, check=False)
        if done.returncode:
            raise refuse(
                f"mount: {done.stderr.strip()}",
                rule="the fault of a full disk needs a small disk to fill",
                fix="as root",
            )
        try:
            yield Path(name)
        finally:
            subprocess.run(["umount", "-l", name], check=False)


def preempted(timeout: float) -> Detection:
    """Asks one process to stop: no fault, but all of them must, after the same step, and well."""
    with started(timeout) as run:
        run.wait_for_training()
        begin = time.monotonic()
        run.children[1].send_signal(signal.SIGTERM)
        ended = run.wait_for_end(within=3 * timeout + 20)
        said = next((line for line in run.output(0).splitlines() if line.startswith("stopped by SIGTERM")), "")
        well = len(ended) == len(run.children) and {status for status, _ in ended.values()} == {STOPPED["SIGTERM"]}
        return Detection("SIGTERM to process 1", time.monotonic() - begin, timeout + 5, well and bool(said), said)


def other_job(timeout: float) -> Detection:
    """Gives one process another job."""
    with started(timeout, words={2: ["optimizer.learning_rate=0.5"]}) as run:
        return _found(run, "process 2 has another job", 2, timeout, starting=True)


def other_program(timeout: float) -> Detection:
    """Gives one process another loss function under the same name."""
    with started(timeout, plants={1: "program"}) as run:
        return _found(run, "process 1 has other code", 1, timeout, starting=True)


def _found(run: Processes, fault: str, process: int, timeout: float, *, starting: bool = False) -> Detection:
    """Waits for the end of the others.

    At the start, what counts is the time from when the last process was ready to be compared.
    """
    begin = time.monotonic()
    ready = None
    limit = LATEST if starting else 3 * timeout + 20
    ended: dict[int, tuple[int, float]] = {}
    while len(ended) < len(run.children) - 1 and time.monotonic() - begin < limit:
        ended |= run.wait_for_end(but=process, within=0.05)
        if ready is None and (
            not starting or len(list((run.folder / "run" / "processes").rglob("[0-9].json"))) == len(run.children)
        ):
            ready = time.monotonic()
    seconds = time.monotonic() - (ready or begin)
    others = [other for other in run.children if other != process]
    said = {other: re.sub(r"\s+", " ", "".join(re.findall(r"error: .*", run.output(other))[:1])) for other in others}
    named = len(ended) == len(others) and all(f"process {process} (host " in text for text in said.values())
    status = {status for status, _ in ended.values()}
    return Detection(
        fault, seconds, timeout + 5, named and 0 not in status, said[others[0]] or run.output(others[0])[-300:]
    )


FAULTS: dict[str, Callable[[float], Detection]] = {
    "killed": lambda timeout: killed(timeout, 2),
    "coordinator killed": lambda timeout: killed(timeout, 0),
    "stopped": lambda timeout: send(timeout, signal.SIGSTOP, 1),
    "coordinator stopped": lambda timeout: send(timeout, signal.SIGSTOP, 0),
    "late": late,
    "corrupt batch": corrupt,
    "nan": nan,
    "full disk": full_disk,
    "preempted": preempted,
    "other job": other_job,
    "other program": other_program,
}


def faults(*, timeout: float = 30.0) -> dict[str, Any]:
    """Plants every fault, prints when it was detected and with which message, and returns that."""
    simulate(1)
    print(f"{PROCESSES} processes with two simulated devices each, run.timeout = {timeout:g} s")
    rows = []
    for name, plant in FAULTS.items():
        found = plant(timeout)
        rows.append(vars(found) | {"name": name, "holds": found.holds})
        print(
            f"{name:<22}{found.seconds:>7.1f} s  {'named' if found.named else 'NOT NAMED'}  {found.said[:160]}",
            flush=True,
        )
    holds = all(row["holds"] for row in rows)
    print(f"every fault found within {timeout + 5:g} s and named: {'yes' if holds else 'NO'}")
    return {"faults": rows, "timeout": timeout, "holds": holds, "where": where()}
