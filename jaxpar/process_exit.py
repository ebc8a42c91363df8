"""Ends a process, alone or together with its supervisor."""

import fcntl
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NoReturn

from jaxpar.errors import LOST

SPEAKING = 1.0  # seconds to print the last words: a full pipe without a reader would block for ever
WARNINGS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGXCPU)  # from SLURM, LSF, SGE and submitit before a job's end


def stop_signals() -> tuple[signal.Signals, ...]:
    """Returns the signals that ask a run to stop: Ctrl-C, SIGTERM, a closing terminal, the warnings of job queues.

    Leaves out SIGHUP if it is ignored, as under `nohup`, and warnings that user code handles, such as by faulthandler.
    """
    hung_up = () if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN else (signal.SIGHUP,)
    caught = _caught()
    warnings = [sig for sig in WARNINGS if signal.getsignal(sig) is signal.SIG_DFL and not caught >> (sig - 1) & 1]
    return (signal.SIGINT, signal.SIGTERM, *hung_up, *warnings)


def _caught() -> int:
    """Returns the mask of signals with a handler, including handlers in C that Python does not see."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
    except OSError:  # not Linux
        return 0
    return next((int(line.split()[1], 16) for line in lines if line.startswith("SigCgt:")), 0)


def exit_process(status: int, last_words: str = "", *, pause: float = 0.0) -> NoReturn:
    """Ends this process at once, from any thread, without cleanup, and without waiting for other processes.

    A print may raise if the reader is gone, or block for ever if it has stopped reading or another thread holds the
    stream. So a separate thread prints, and is joined with a timeout.

    Args:
      status: The exit status.
      last_words: Printed to stderr, if it can be written.
      pause: Seconds between the print and the end.
    """
    try:
        speaker = threading.Thread(target=_speak, args=(last_words,), daemon=True)
        speaker.start()
        speaker.join(SPEAKING)
        time.sleep(pause)
    finally:
        os._exit(status)


def _speak(last_words: str) -> None:
    with suppress(OSError, ValueError):  # broken, or closed
        if last_words:
            print(last_words, file=sys.stderr)
        sys.stderr.flush()
    with suppress(OSError, ValueError):
        sys.stdout.flush()


# Ends a process together with its supervisor: each holds one end of a pipe that never carries data.
#
#     supervisor ─── writing end        if the supervisor ends, even by kill -9, the system closes its end:
#     process    ◄── reading end        the blocking read of a thread returns, and the process exits
#
# Without it the processes of a dead supervisor would wait forever, and hold their GPUs.

LIFELINE = "JAXPAR_LIFELINE"  # file descriptor of the reading end, and the id of the process that reads it


@contextmanager
def lifeline() -> Iterator[int]:
    """Holds the writing end, as the supervisor; yields the reading end, for processes to inherit."""
    reading, writing = _above_streams(os.pipe())
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _above_streams(ends: tuple[int, int]) -> tuple[int, int]:
    """Moves both ends to descriptors above 2, because the streams of the processes take the others.

    If this process has a closed stdin, a pipe gets descriptor 0: a process that inherits it as its lifeline would find
    its own stdin there, whose end would look like the death of the supervisor.
    """
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


def exit_with_supervisor() -> None:
    """Ends this process when its supervisor has died; does nothing without a supervisor."""
    end, _, owner = os.environ.get(LIFELINE, "").partition(" ")
    pid = str(os.getpid())
    if end and owner in ("", pid):  # another owner is this process's parent: the variable was inherited, not the pipe
        os.environ[LIFELINE] = f"{end} {pid}"  # kept, like the pipe: a process may restart itself by exec
        threading.Thread(target=_wait_for_supervisor, args=(int(end),), name="jaxpar-lifeline", daemon=True).start()


def _wait_for_supervisor(end: int) -> None:
    os.read(end, 1)
    exit_process(LOST, "error: the supervisor (jaxpar launch) is gone, and this process ends with it")
