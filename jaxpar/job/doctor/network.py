"""The other processes: who says where they are, whether process 0 is reached, what clocks and run folders say.

process 0                 listens at the coordinator's address, tells who asks the time and a file in its run folder
the others                ask it: reached or not, their clock against its clock, whether they see that file

For that it runs on all of them at once, as the run itself will: `srun jaxpar doctor JOB`.
"""

import os
import socket
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from jaxpar.cluster.environment import Cluster, detect
from jaxpar.errors import JaxparError
from jaxpar.job.doctor.finding import Finding
from jaxpar.job.doctor.machine import nearest_folder
from jaxpar.train.watchdog.meeting import FIX
from jaxpar.units import show_seconds

HELLO = b"jaxpar doctor "
SIGN = ".jaxpar-doctor-"  # how the file begins that process 0 leaves for the others to see
SKEW = 1.0  # seconds between two clocks


def processes(environment: Mapping[str, str]) -> tuple[list[Finding], Cluster | None]:
    """Returns the finding about other processes in the environment."""
    try:
        cluster = detect(environment)
    except JaxparError as error:
        return [Finding("processes", "problem", f"{p.got} (rule: {p.rule})", p.fix) for p in error.problems], None
    if cluster is None:
        return [Finding("processes", "ok", "this one alone")], None
    return [Finding("processes", "ok", str(cluster))], cluster


def meet(cluster: Cluster, *, seconds: float, folder: Path | None = None) -> Iterator[Finding]:
    """Looks for the others, for at most so many seconds: process 0 waits for them, they look for it.

    Args:
      cluster: As this process sees it.
      seconds: How long.
      folder: Which all must see, the run's; or the innermost above it that is there.
    """
    try:
        where = socket.getaddrinfo(cluster.host, cluster.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        yield Finding("coordinator", "problem", f"{cluster.host} is no host known here: {error.strerror}",
            "the host's name in /etc/hosts or DNS, or JAXPAR_COORDINATOR with its address")  # fmt: skip
        return
    address = str(where[4][0])
    loopback = address.startswith("127.") or address == "::1"
    if loopback and cluster.host not in ("localhost", "::1") and not cluster.host.startswith("127."):
        yield Finding("coordinator", "warning", f"{cluster.host} is {address} here, which others do not reach",
            f"JAXPAR_COORDINATOR with the address that others reach, or {cluster.host} out of the line of 127.0.1.1 in "
            "/etc/hosts")  # fmt: skip
    at = nearest_folder(folder) if folder else None
    if cluster.process:
        yield from _ask(cluster, seconds, at)
        return
    with _sign(at) as name:
        yield from _serve(cluster, where, seconds, name)


@contextmanager
def _sign(at: Path | None) -> Iterator[str]:
    """Leaves a file in a folder while the others look, and gives its name; "" where none can be left."""
    if at is None or not os.access(at, os.W_OK):  # that it cannot be written is another finding
        yield ""
        return
    with tempfile.NamedTemporaryFile(dir=at, prefix=SIGN) as file:
        yield Path(file.name).name


def _serve(cluster: Cluster, where: tuple, seconds: float, name: str) -> Iterator[Finding]:
    kind, _, _, _, address = where
    until, came = time.monotonic() + seconds, set()
    with socket.socket(kind, socket.SOCK_STREAM) as server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            server.bind(address)
            server.listen(cluster.processes)
        except OSError as error:
            text = f"process 0 cannot listen on {cluster.coordinator}: {error.strerror}"
            fix = "another port; or a run is under way there; or process 0 runs on another host"
            yield Finding("coordinator", "problem", text, fix)
            return
        while len(came) < cluster.processes - 1 and time.monotonic() < until:
            server.settimeout(max(0.01, until - time.monotonic()))
            try:
                asking, _ = server.accept()
                with asking:
                    asking.settimeout(1.0)
                    asking.sendall(HELLO + f"{time.time():.6f} {name}\n".encode())
                    came.add(asking.recv(16))
            except OSError:  # nobody came, or who came left: counted below
                continue
    others = cluster.processes - 1
    text = f"process 0 listens on {cluster.coordinator}; {len(came)} of the {others} others came in {seconds:g} s"
    if len(came) < others:
        yield Finding("coordinator", "warning", text, "run jaxpar doctor on all of them at once: srun jaxpar doctor")
    else:
        yield Finding("coordinator", "ok", text)


def _ask(cluster: Cluster, seconds: float, at: Path | None) -> Iterator[Finding]:
    until, why = time.monotonic() + seconds, ""
    while (left := until - time.monotonic()) > 0:
        try:
            before = time.time()
            with socket.create_connection((cluster.host, cluster.port), timeout=left) as server:
                text, after = _heard(server), time.time()
                clock, *name = text.removeprefix(HELLO).decode(errors="replace").split() or [""]
                shared = [_shared(at, name[0])] if at and name and name[0].startswith(SIGN) else []
                server.sendall(str(cluster.process).encode())
        except TimeoutError:
            why = f"no answer in {seconds:g} s"
        except OSError as error:
            why = error.strerror or str(error)
            time.sleep(min(0.2, left))
        else:
            yield Finding("coordinator", "ok", f"{cluster.coordinator} answers")
            if text.startswith(HELLO):
                yield _clock(float(clock), before, after)
                yield from shared
            return
    yield Finding("coordinator", "problem", f"{cluster.coordinator} does not answer: {why}", "process 0 must run (srun "
        "jaxpar doctor asks on all of them at once); is its port open in the firewall?")  # fmt: skip


def _heard(server: socket.socket) -> bytes:
    """Returns the first bytes of the other side, b"" where it waits: then a run listens there, not a doctor."""
    server.settimeout(1.0)
    try:
        return server.recv(256)
    except TimeoutError:
        return b""


def _shared(at: Path, name: str) -> Finding:
    """Returns whether process 0's file shows here; its name is new, so no cache can say that it is not there."""
    if "/" not in name and (at / name).exists():
        return Finding("shared", "ok", f"what process 0 writes into {at} is seen here")
    return Finding("shared", "problem", f"what process 0 writes is not seen in {at}: all processes of a run share its "
        "folder", FIX)  # fmt: skip


def _clock(theirs: float, before: float, after: float) -> Finding:
    off = theirs - (before + after) / 2
    side, error = "ahead" if off > 0 else "behind", show_seconds((after - before) / 2)
    text = f"process 0's is {show_seconds(abs(off))} {side} (± {error})"
    if abs(off) > SKEW:
        return Finding("clock", "warning", text, "set the clocks (chronyc tracking, timedatectl)")
    return Finding("clock", "ok", text)
