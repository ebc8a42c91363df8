"""Checks of the other processes: their discovery, the connection to process 0, clocks and the shared run folder.

process 0                 listens at the coordinator's address; sends its time and the name of a file in the run folder
other processes           connect to it, compare clocks, and check that they see the file

Run it on all processes at once, like the run itself: `srun jaxpar doctor JOB`.
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
from jaxpar.job.doctor.this_machine import Finding, nearest_folder
from jaxpar.train.watchdog.beat import FIX
from jaxpar.units import show_seconds

HELLO = b"jaxpar doctor "
SIGN = ".jaxpar-doctor-"  # name prefix of a file of process 0, to test whether the other hosts see it
SKEW = 1.0  # seconds that the clocks of two hosts may differ


def processes(environment: Mapping[str, str]) -> tuple[list[Finding], Cluster | None]:
    """Detects the other processes from environment variables."""
    try:
        cluster = detect(environment)
    except JaxparError as error:
        return [Finding("processes", "problem", f"{p.got} (rule: {p.rule})", p.fix) for p in error.problems], None
    if cluster is None:
        return [Finding("processes", "ok", "this one alone")], None
    return [Finding("processes", "ok", str(cluster))], cluster


def check_connection(cluster: Cluster, *, seconds: float, folder: Path | None = None) -> Iterator[Finding]:
    """Checks the connection between the processes: process 0 waits for the others, and they connect to it.

    Args:
      cluster: The cluster as this process sees it.
      seconds: The time limit.
      folder: The run folder, which all processes must share, or its nearest existing ancestor.
    """
    try:
        endpoint = socket.getaddrinfo(cluster.host, cluster.port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        yield Finding("coordinator", "problem", f"{cluster.host} is no host known here: {error.strerror}",
            "the host's name in /etc/hosts or DNS, or JAXPAR_COORDINATOR with its address")  # fmt: skip
        return
    address = str(endpoint[4][0])
    loopback = address.startswith("127.") or address == "::1"
    if loopback and cluster.host not in ("localhost", "::1") and not cluster.host.startswith("127."):
        yield Finding("coordinator", "warning", f"{cluster.host} is {address} here, which others do not reach",
            f"JAXPAR_COORDINATOR with the address that others reach, or {cluster.host} out of the line of 127.0.1.1 in "
            "/etc/hosts")  # fmt: skip
    ancestor = nearest_folder(folder) if folder else None
    if cluster.process:
        yield from _query_server(cluster, seconds, ancestor)
        return
    with _temporary_file(ancestor) as name:
        yield from _serve(cluster, endpoint, seconds, name)


@contextmanager
def _temporary_file(folder: Path | None) -> Iterator[str]:
    """Context with a temporary file in a folder; yields the file's name, "" if the folder is not writable."""
    if folder is None or not os.access(folder, os.W_OK):  # another check reports that it is not writable
        yield ""
        return
    with tempfile.NamedTemporaryFile(dir=folder, prefix=SIGN) as file:
        yield Path(file.name).name


def _serve(cluster: Cluster, where: tuple, seconds: float, name: str) -> Iterator[Finding]:
    kind, _, _, _, address = where
    deadline, guests = time.monotonic() + seconds, set()
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
        while len(guests) < cluster.processes - 1 and time.monotonic() < deadline:
            server.settimeout(max(0.01, deadline - time.monotonic()))
            try:
                connection, _ = server.accept()
                with connection:
                    connection.settimeout(1.0)
                    connection.sendall(HELLO + f"{time.time():.6f} {name}\n".encode())
                    guests.add(connection.recv(16))
            except OSError:  # a timeout or a dropped connection: counted below
                continue
    peers = cluster.processes - 1
    text = f"process 0 listens on {cluster.coordinator}; {len(guests)} of the {peers} others came in {seconds:g} s"
    if len(guests) < peers:
        yield Finding("coordinator", "warning", text, "run jaxpar doctor on all of them at once: srun jaxpar doctor")
    else:
        yield Finding("coordinator", "ok", text)


def _query_server(cluster: Cluster, seconds: float, folder: Path | None) -> Iterator[Finding]:
    deadline, reason = time.monotonic() + seconds, ""
    while (seconds_left := deadline - time.monotonic()) > 0:
        try:
            start = time.time()
            with socket.create_connection((cluster.host, cluster.port), timeout=seconds_left) as server:
                text, end = _receive_greeting(server), time.time()
                clock, *name = text.removeprefix(HELLO).decode(errors="replace").split() or [""]
                shared = [_check_shared_folder(folder, name[0])] if folder and name and name[0].startswith(SIGN) else []
                server.sendall(str(cluster.process).encode())
        except TimeoutError:
            reason = f"no answer in {seconds:g} s"
        except OSError as error:
            reason = error.strerror or str(error)
            time.sleep(min(0.2, seconds_left))
        else:
            yield Finding("coordinator", "ok", f"{cluster.coordinator} answers")
            if text.startswith(HELLO):
                yield _clock(float(clock), start, end)
                yield from shared
            return
    yield Finding("coordinator", "problem", f"{cluster.coordinator} does not answer: {reason}", "process 0 must run "
        "(srun jaxpar doctor asks on all of them at once); is its port open in the firewall?")  # fmt: skip


def _receive_greeting(server: socket.socket) -> bytes:
    """Receives the greeting of the server; b"" if it sends none, because a run listens there instead of a doctor."""
    server.settimeout(1.0)
    try:
        return server.recv(256)
    except TimeoutError:
        return b""


def _check_shared_folder(folder: Path, name: str) -> Finding:
    """Checks that process 0's file is visible here; its name is new, so that no stale cache can hide it."""
    if "/" not in name and (folder / name).exists():
        return Finding("shared", "ok", f"what process 0 writes into {folder} is seen here")
    got = f"what process 0 writes is not seen in {folder}: all processes of a run share its folder"
    return Finding("shared", "problem", got, FIX)


def _clock(theirs: float, before: float, after: float) -> Finding:
    skew = theirs - (before + after) / 2
    direction, error = "ahead" if skew > 0 else "behind", show_seconds((after - before) / 2)
    text = f"process 0's is {show_seconds(abs(skew))} {direction} (± {error})"
    if abs(skew) > SKEW:
        return Finding("clock", "warning", text, "set the clocks (chronyc tracking, timedatectl)")
    return Finding("clock", "ok", text)
