"""A process ends with its supervisor: each holds one end of a pipe through which nothing is ever sent.

    supervisor ─── writing end        whatever ends the supervisor, kill -9 too, the system closes its end:
    process    ◄── reading end        the read of a thread that waits there returns, and the process leaves

Without it the processes of a dead supervisor would wait for ever, and hold their GPUs.
"""

import fcntl
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from jaxpar.errors import LOST
from jaxpar.leaving import leave

VARIABLE = "JAXPAR_LIFELINE"  # the number of the reading end, and of the process that it is for


@contextmanager
def lifeline() -> Iterator[int]:
    """Holds a writing end, as the supervisor; gives the reading end, for processes to inherit."""
    reading, writing = _above_streams(os.pipe())
    try:
        yield reading
    finally:
        os.close(reading)
        os.close(writing)


def _above_streams(ends: tuple[int, int]) -> tuple[int, int]:
    """Returns both ends under numbers above 2, which the streams of the processes take.

    Where this process has a closed stdin, a pipe gets number 0: a process that inherits it as its lifeline would find
    its own stdin there, whose end means that the supervisor is gone.
    """
    reading, writing = (fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 3) for end in ends)
    for end in ends:
        os.close(end)
    return reading, writing


def follow() -> None:
    """Ends this process when the supervisor that started it has died; without one it does nothing."""
    end, _, owner = os.environ.get(VARIABLE, "").partition(" ")
    me = str(os.getpid())
    if end and owner in ("", me):  # another is the parent of this process, which got the variable and not the pipe
        os.environ[VARIABLE] = f"{end} {me}"  # stays, as the pipe does: a process may start itself anew by exec
        threading.Thread(target=_wait, args=(int(end),), name="jaxpar-lifeline", daemon=True).start()


def _wait(end: int) -> None:
    os.read(end, 1)
    leave(LOST, "error: the supervisor (jaxpar launch) is gone, and this process ends with it")
