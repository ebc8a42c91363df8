"""Connects the processes of a cluster within a timeout, or raises an error that names the missing ones.

Waits for all processes before JAX connects them, because JAX would end them without naming the missing ones.

    others ──{process, processes, host, same}──► process 0, which waits for all of them
           ◄──────────── {word} ───────────────  when all have joined: a text for all, such as the attempt's name
           ──────── {problem or none} ─────────► a problem with it, such as a folder that this host does not see
           ◄─────── {problem or none} ─────────  all continue; or the reason why not, the same for all of them

It uses the coordinator's address, which process 0 then releases for JAX. As in JAX's own service, there is no
authentication: any program that reaches the address can claim to be process 1, so the address must be in a private
network. Each connection has a deadline, so that a silent or slow one does not delay the others.
"""

import os
import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

import jax

from jaxpar.cluster.environment import Cluster
from jaxpar.cluster.peers import ANSWER, RULE, Peer, Peers, read_problem
from jaxpar.errors import JaxparError, Problem, refuse

HEARTBEAT = 30  # seconds without a heartbeat after which a process counts as lost


def host_rendezvous(cluster: Cluster, *, bind: str, until: float, fingerprint: str, word: str = "") -> None:
    """Process 0's side: waits until all other processes have joined.

    Args:
      cluster: The cluster as process 0 sees it.
      bind: Address to listen on, host:port.
      until: Deadline, by `time.monotonic`.
      fingerprint: Text that must be equal in all processes, such as the hash of the job.
      word: Text that process 0 sends to all; each process checks it and answers with a problem or none.

    Raises:
      JaxparError: If it cannot listen, processes are missing, one belongs to another run, or one answers `word` with a
        problem; all processes get the same error.
    """
    with _listen_socket(cluster, bind) as server:
        peers, problem = Peers(cluster, fingerprint), None
        while problem is None:  # again, if a process was lost between joining and answering
            problem = peers.gather(server, until) or peers.send_word(word)
            if not peers.missing():
                break
        peers.finish(problem)
    if problem:
        raise _refusal_error(cluster, problem)


def _listen_socket(cluster: Cluster, bind: str) -> socket.socket:
    host, _, port = bind.rpartition(":")
    try:
        family, _, _, _, address = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        server = socket.socket(family, socket.SOCK_STREAM)
    except OSError as error:
        raise _connection_error(
            cluster, f"{host} is no address: {error.strerror}", "a name or an address of this machine"
        ) from error
    server.setblocking(False)
    # the port of an attempt that ended a moment ago is in TIME_WAIT, and the next attempt needs it
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(address)
        server.listen(cluster.processes)
    except OSError as error:
        server.close()
        fix = "a free port of this machine in the coordinator's address; or run process 0 on the coordinator's machine"
        raise _connection_error(cluster, f"cannot listen on {bind}: {error.strerror}", fix) from error
    return server


def join_rendezvous(
    cluster: Cluster, *, until: float, fingerprint: str, check: Callable[[str], Problem | None] = lambda word: None
) -> str:
    """The side of all other processes: connects to process 0 and waits until all have joined; returns its word.

    Args:
      cluster: The cluster as this process sees it.
      until: Deadline, by `time.monotonic`.
      fingerprint: Text that must be equal in all processes.
      check: Checks the word and returns a problem, if any.

    Raises:
      JaxparError: If process 0 is not found in time, or reports an error of the rendezvous.
    """
    hello = {
        "process": cluster.process,
        "processes": cluster.processes,
        "host": socket.gethostname(),
        "same": fingerprint,
    }
    start, reason = time.monotonic(), ""
    while (remaining := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=remaining) as server:
                word, problem = _listen(server, hello, until=until + ANSWER + 2.0, check=check)
            if problem:
                raise _refusal_error(cluster, problem)
            return word
        except ValueError as error:
            if isinstance(error, JaxparError):
                raise
            reason = "it hung up"  # process 0 of an earlier attempt, or another program: tried again
        except OSError as error:
            reason = error.strerror or str(error)
        # process 0 may start minutes after the others if a queue starts nodes one by one
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    seconds = time.monotonic() - start
    fix = "is process 0 running, is its host's name known here, and its port open? jaxpar doctor checks this"
    raise _connection_error(cluster, f"no answer from the coordinator in {seconds:.1f} s: {reason}", fix)


def _listen(
    server: socket.socket, introduction: dict[str, Any], *, until: float, check: Callable[[str], Problem | None]
) -> tuple[str, Problem | None]:
    """Waits for the messages of process 0; returns its word, and the problem that ended the rendezvous, if any.

    Raises:
      ValueError: If the other side closes the connection, or is not process 0.
      OSError: If the connection breaks, or times out.
    """
    # `until` is later than the deadline of process 0, so that process 0 gives up first and can say why
    word, process_0 = "", Peer(server, until)
    process_0.send(introduction)
    while True:
        server.settimeout(max(0.01, until - time.monotonic()))
        if (message := process_0.receive()) is None:
            continue
        if "word" not in message:
            return word, read_problem(message["problem"]) if message.get("problem") else None
        word = str(message["word"])
        problem = check(word)
        process_0.send({"problem": asdict(problem) if problem else None})


def _refusal_error(cluster: Cluster, problem: Problem) -> JaxparError:
    return _connection_error(cluster, problem.got, problem.fix, rule=problem.rule)


def _connection_error(cluster: Cluster, reason: str, fix: str, *, rule: str = RULE) -> JaxparError:
    sender = (
        f"process {cluster.process} of {cluster.processes} on {socket.gethostname()}, coordinator {cluster.coordinator}"
    )
    return refuse(f"{sender}: {reason}", rule=rule, fix=fix)


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
      check: Function of the text that process 0 sent. All other processes call it; it returns a problem or None.

    Raises:
      JaxparError: If process 0 cannot listen or is not found; if other processes are missing at the timeout, belong to
        another run (another count, job, or the same number twice) or their `check` returns a problem; if this process
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
