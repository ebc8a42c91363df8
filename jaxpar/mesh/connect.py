"""The processes of a cluster find each other, within a set time or with a reason.

    the others: until process 0 listens ─► jax.distributed ─► all of them there
    process 0:  its port is free        ─►

JAX alone would let two coordinators share a port, and end a process without an exception where one is not found.
"""

import os
import socket
import time

import jax

from jaxpar.errors import JaxparError, refuse
from jaxpar.mesh.processes import Cluster

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost


def connect(cluster: Cluster, *, timeout: float = 300, heartbeat: int = HEARTBEAT) -> None:
    """Joins this process to the others of its cluster; returns when all of them are there.

    Must come before the first use of a device. Process 0 listens on the coordinator's address alone, or on
    `JAX_COORDINATOR_BIND_ADDRESS`, for where its name means another address inside than outside.

    Args:
      cluster: As `detect` returns it.
      timeout: Seconds until all must be there.
      heartbeat: Seconds without a sign of life after which a process counts as lost, and JAX ends the others.

    Raises:
      JaxparError: If process 0 cannot listen, is not found, or does not know this process; if others are
        missing when the time is over; if this process is connected already, or JAX has made its devices.
    """
    if jax.distributed.is_initialized():
        raise refuse(
            f"connect a second time, as {cluster}",
            rule="a process joins one cluster, once",
            fix="connect at the start of the program, and only there",
        )
    until = time.monotonic() + timeout
    if cluster.process == 0:
        bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", cluster.coordinator)
        if why := cannot_listen(bind):
            raise _lost(cluster, f"cannot listen on {bind}: {why}", "a free port of this machine in the coordinator's "
                "address; or process 0 runs elsewhere than the address says")  # fmt: skip
    else:
        bind = None
        _await(cluster, until, timeout)
    try:
        jax.distributed.initialize(
            cluster.coordinator, cluster.processes, cluster.process, coordinator_bind_address=bind,
            local_device_ids=cluster.devices, cluster_detection_method="deactivate",
            initialization_timeout=max(1, round(until - time.monotonic())), heartbeat_timeout_seconds=heartbeat,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        raise _explained(cluster, error, timeout) from error


def cannot_listen(address: str) -> str:
    """Returns why no one can listen on host:port of this machine, or "" if it can be done."""
    host, _, port = address.rpartition(":")
    try:
        kind, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        with socket.socket(kind, socket.SOCK_STREAM) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what lingers is no one
            probe.bind(where)
            probe.listen(1)
    except OSError as error:
        return error.strerror or str(error)
    return ""


def cannot_reach(cluster: Cluster, seconds: float) -> str:
    """Returns why the coordinator does not answer within so many seconds, or "" if it does."""
    try:
        with socket.create_connection((cluster.host, cluster.port), timeout=max(0.01, seconds)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _await(cluster: Cluster, until: float, timeout: float) -> None:
    """Waits until process 0 listens."""
    while why := cannot_reach(cluster, min(5.0, until - time.monotonic())):
        if time.monotonic() + 0.2 > until:
            raise _lost(cluster, f"no answer from the coordinator in {timeout:g} s: {why}", "is process 0 running, is "
                "its host's name known here, and its port open? jaxpar doctor looks")  # fmt: skip
        time.sleep(0.2)


def _explained(cluster: Cluster, error: Exception, timeout: float) -> JaxparError:
    text = str(error)
    if "DEADLINE_EXCEEDED" in text or "timed out" in text.lower():
        return _lost(cluster, f"not all processes were there after {timeout:g} s", "are they all started, and do all "
            "of them say the same count and the same coordinator? jaxpar doctor looks")  # fmt: skip
    if "before any JAX" in text or "backends" in text:
        return refuse(f"{cluster}: JAX has made its devices already", rule="processes are connected before the first "
            "device is used", fix="connect at the start of the program")  # fmt: skip
    return _lost(cluster, (text.strip().splitlines() or [type(error).__name__])[0][:200], "do all processes say the "
        "same count, and each a number of its own? jaxpar doctor looks")  # fmt: skip


def _lost(cluster: Cluster, why: str, fix: str) -> JaxparError:
    return refuse(
        f"process {cluster.process} of {cluster.processes} on {socket.gethostname()}, coordinator "
        f"{cluster.coordinator}: {why}",
        rule="all processes of a run find process 0, which listens where the coordinator's address says",
        fix=fix,
    )
