"""Connects the processes of a cluster, within a set time or with an error that names the missing ones."""

import os
import time
from collections.abc import Callable

import jax

from jaxpar.cluster.environment import Cluster
from jaxpar.cluster.rendezvous import host_rendezvous, join_rendezvous
from jaxpar.errors import Problem, refuse

HEARTBEAT = 30  # seconds without a sign of life after which a process counts as lost


def connect(
    cluster: Cluster, *, timeout: float = 300, heartbeat: int = HEARTBEAT, same: str = "", word: str = "",
    check: Callable[[str], Problem | None] = lambda word: None,
) -> str:  # fmt: skip
    """Joins this process to the others of its cluster; returns the word of process 0 when all of them are there.

    Must come before the first use of a device. Process 0 listens on the coordinator's address alone, or on
    `JAX_COORDINATOR_BIND_ADDRESS`, for where its name means another address inside than outside.

    Args:
      cluster: As `detect` returns it.
      timeout: Seconds until all must be there.
      heartbeat: Seconds without a sign of life after which a process counts as lost, and JAX ends the others.
      same: Text that all processes must send alike: `job 3fa9, jaxpar 0.1.0`. "" from all compares nothing.
      word: Text that process 0 sends to the others, such as the name of the attempt.
      check: Returns the problem that this process has with that word, if any; called in all but process 0.

    Raises:
      JaxparError: If process 0 cannot listen or is not found; if others are missing when the time is over, do not
        fit (another count, the same number twice, another job) or have a problem with the word; if this process
        is connected already, or JAX has made its devices.
    """
    if jax.distributed.is_initialized():
        raise refuse(
            f"connect a second time, as {cluster}",
            rule="a process connects once",
            fix="connect at the start of the program, and only there",
        )
    until = time.monotonic() + timeout
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", cluster.coordinator)
    # JAX's own connection names nobody who is missing, so all meet before it, at the same address
    if cluster.process == 0:
        host_rendezvous(cluster, bind=bind, until=until, same=same, word=word)
    else:
        word = join_rendezvous(cluster, until=until, same=same, check=check)
    # all have come, so JAX needs seconds; its own detection is off, as it would read the variables of a launcher that
    # `detect` may have decided against
    try:
        jax.distributed.initialize(
            cluster.coordinator, cluster.processes, cluster.process, coordinator_bind_address=bind,
            local_device_ids=cluster.devices, cluster_detection_method="deactivate",
            initialization_timeout=max(20, round(until - time.monotonic())), heartbeat_timeout_seconds=heartbeat,
        )  # fmt: skip
    except (RuntimeError, ValueError) as error:
        text = (str(error).strip().splitlines() or [type(error).__name__])[0]
        raise refuse(
            f"{cluster}: {text:.200}",
            rule="processes are connected before the first device is used, and stay until all are",
            fix="connect at the start of the program; the output of the other processes may say more",
        ) from error
    return word
