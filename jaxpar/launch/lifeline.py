"""Ends a process together with its supervisor: each holds one end of a pipe that never carries data.

    supervisor ─── writing end        if the supervisor ends, even by kill -9, the system closes its end:
    process    ◄── reading end        the blocking read of a thread returns, and the process exits

Without it the processes of a dead supervisor would wait forever, and hold their GPUs.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.errors import LOST
from jaxpar.process_exit import exit_process

VARIABLE = "JAXPAR_LIFELINE"  # file descriptor of the reading end, and the id of the process that reads it


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
    end, _, owner = os.environ.get(VARIABLE, "").partition(" ")
    pid = str(os.getpid())
    if end and owner in ("", pid):  # another owner is this process's parent: the variable was inherited, not the pipe
        os.environ[VARIABLE] = f"{end} {pid}"  # kept, like the pipe: a process may restart itself by exec
        threading.Thread(target=_wait, args=(int(end),), name="jaxpar-lifeline", daemon=True).start()


def _wait(end: int) -> None:
    os.read(end, 1)
    exit_process(LOST, "error: the supervisor (jaxpar launch) is gone, and this process ends with it")
