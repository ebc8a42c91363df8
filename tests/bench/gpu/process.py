"""A process with a limit: when the limit has passed, it and all that it has started are killed."""

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from jaxpar.process_exit import LIFELINE, lifeline

PATIENCE = 5.0  # seconds for a killed process to be gone: one that is stuck in the driver may never be
KEPT = 128 * 2**10  # bytes of a stage's output that go into the log, from its end
LOG = 2 * 2**20  # bytes of the log


@dataclass(frozen=True)
class Ended:
    """How a process ended.

    Attributes:
      status: Its exit status, negative for a signal; None where the limit had passed.
      seconds: How long it took.
      said: The last line of its output.
    """

    status: int | None
    seconds: float
    said: str


def run_limited(command: Sequence[str], *, limit: float, log: Path, environment: Mapping[str, str]) -> Ended:
    """Runs a command to its end, or to its limit, and appends the end of its output to a log.

    Whatever ends this process ends the command too: it follows a lifeline.
    """
    output = log.with_suffix(".part")
    begin = time.monotonic()
    with lifeline() as end, output.open("wb") as file:
        process = subprocess.Popen(
            list(command), stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT, start_new_session=True,
            env={**environment, LIFELINE: f"{end}"}, pass_fds=(end,),
        )  # fmt: skip
        status: int | None = None
        try:
            status = process.wait(limit)
        except subprocess.TimeoutExpired:
            pass
        finally:
            with suppress(ProcessLookupError):  # of the group: also what it has left behind
                os.killpg(process.pid, signal.SIGKILL)
            with suppress(subprocess.TimeoutExpired):
                process.wait(PATIENCE)
    seconds = time.monotonic() - begin
    said = _kept(output)
    _append(log, said)
    lines = [line for line in said.splitlines() if line.strip()]
    return Ended(status, seconds, lines[-1].strip()[:300] if lines else "")


def _kept(output: Path) -> str:
    text = output.read_bytes()[-KEPT:].decode(errors="replace")
    output.unlink()
    return text


def _append(log: Path, text: str) -> None:
    """Adds to the log, of which the beginning is dropped when it is full; a full disk takes no log."""
    before = log.read_text(errors="replace") if log.exists() else ""
    with suppress(OSError):
        log.write_text((before + text)[-LOG:])
