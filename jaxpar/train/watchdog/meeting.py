"""Makes a run's processes agree on the name of the attempt, and checks that they share a run folder.

    process 0   makes RUN/processes/ATTEMPT, with a name that no attempt had before, and sends the name
    the others  look for that folder: one that does not see it has another run folder, on a disk of its own

So a supervisor that was restarted joins the attempt that the others begin, however many it has counted
itself; and no process takes the files of an earlier attempt for heartbeats.
"""

import os
import socket
import time
from pathlib import Path

from jaxpar.errors import Problem

SEEN = 10.0  # seconds within which a new folder shows on all hosts, where a file server is slow
FIX = "run.dir = a folder on a file system that all hosts share, at the same path: NFS, Lustre, a mounted bucket"


def begin(run: Path) -> str:
    """Makes the folder of a new attempt, and returns its name."""
    host = socket.gethostname()
    name = f"{time.strftime('%Y%m%d-%H%M%S')}-{host}-{os.getpid()}-{time.monotonic_ns()}"
    (run / "processes" / name).mkdir(parents=True)
    return name


def look(run: Path, attempt: str, *, process: int, seconds: float = SEEN) -> Problem | None:
    """Returns a problem if this process does not see the run folder of process 0; looks for `seconds`."""
    until = time.monotonic() + seconds
    while not (run / "processes" / attempt).is_dir():
        if time.monotonic() > until:
            got = f"process {process} on {socket.gethostname()} does not see what process 0 writes into {run.resolve()}"
            return Problem(got, "all processes of a run share its folder: its checkpoints and signs of life", FIX)
        time.sleep(0.1)
    return None
