"""The first meeting of a run's processes: they agree on the attempt, and check that they share a run folder.

    process 0   makes RUN/processes/ATTEMPT, with a name that no attempt had before, and tells the name
    the others  look whether they see that folder: who does not has another run folder on a disk of its own

So a supervisor that was lost and started again joins the attempt that the others begin, however many it has counted
itself; and nobody takes what an earlier attempt left for a sign of life.
"""

import os
import socket
import time
from pathlib import Path

from jaxpar.errors import Problem

SEEN = 10.0  # seconds in which a new folder shows on all hosts, where a file server is slow
FIX = "run.dir = a folder on a file system that all hosts share, at the same path: NFS, Lustre, a mounted bucket"


def begin(run: Path) -> str:
    """Returns the name of a new attempt, whose folder is made."""
    host = socket.gethostname()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}-{os.getpid()}-{time.monotonic_ns()}"
    (run / "processes" / name).mkdir(parents=True)
    return name


def look(run: Path, attempt: str, *, process: int, seconds: float = SEEN) -> Problem | None:
    """Returns that this process has another run folder than process 0, if so; looks for so many seconds."""
    until = time.monotonic() + seconds
    while not (run / "processes" / attempt).is_dir():
        if time.monotonic() > until:
            got = f"process {process} on {socket.gethostname()} does not see what process 0 writes into {run.resolve()}"
            return Problem(got, "all processes of a run share its folder: its checkpoints and signs of life", FIX)
        time.sleep(0.1)
    return None
