"""Connects the processes of a cluster within a timeout, or raises an error that names the missing ones."""

import os
import time
from collections.abc import Callable

import jax

from jaxpar.cluster.environment import Cluster
from jaxpar.cluster.rendezvous import host_rendezvous, join_rendezvous
from jaxpar.errors import Problem, refuse

HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as lost


def connect(
    cluster: Cluster, *, timeout: float = 300, heartbeat: int = HEARTBEAT, fingerprint: str = "", word: str = "",
    check: Callable[[str], Problem | None] = lambda word: None,
) -> str:  # fmt: skip
    """Connects this process to the others of its cluster; returns process 0's `word` when all have joined.

    Call it before the first use of a device. Process 0 listens only on the coordinator's address. If that name resolves
    to another address on its own machine, set `JAX_COORDINATOR_BIND_ADDRESS` to the address to listen on.

    Args:
      cluster: Result of `detect`.
      timeout: Seconds within which all processes must join.
      heartbeat: Seconds without a heartbeat after which a process counts as lost, and JAX ends the others.
      fingerprint: Text that must be equal in all processes: `job 3fa9, jaxpar 0.1.0`; "" for no comparison.
      word: Text that process 0 sends to all others, such as the name of the attempt.
      check: Called with `word` by all processes except process 0; returns a problem, or None if there is none.

    Raises:
      JaxparError: If process 0 cannot listen or is not found; if other processes are missing at the timeout, belong to
        another run (another count, job, or the same number twice) or their `check` of the word fails; if this process
        is already connected, or JAX has already created its devices.
    """
    if jax.distributed.is_initialized():
        raise refuse(
            f"connect a second time, as {cluster}",
            rule="a process connects once",
            fix="connect at the start of the program, and only there",
        )
    until = time.monotonic() + timeout
    bind = os.environ.get("JAX_COORDINATOR_BIND_ADDRESS", cluster.coordinator)
    # JAX's own connection does not name missing processes, so all connect to process 0 here first
    if cluster.process == 0:
        host_rendezvous(cluster, bind=bind, until=until, fingerprint=fingerprint, word=word)
    else:
        word = join_rendezvous(cluster, until=until, fingerprint=fingerprint, check=check)
    # all are there, so JAX needs only seconds; its own detection is off because it would read the variables of a
    # launcher that `detect` may have rejected
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
            rule="processes connect before the first device is used, and stay until all are connected",
            fix="connect at the start of the program; the output of the other processes may say more",
        ) from error
    return word
