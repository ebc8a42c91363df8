"""Checks that all processes have come before JAX connects them: JAX would end them without naming the missing one.

    others ──{process, processes, host, same}──► process 0, which waits for all of them
           ◄──────────── {word} ───────────────  once all have come: a text for all, such as the attempt's name
           ──────── {problem or none} ─────────► a problem with it, such as a folder that this host does not see
           ◄─────── {problem or none} ─────────  all go on; or the reason why not, the same for all of them

It takes place at the coordinator's own address, which process 0 releases again for JAX. There is no authentication, as
in JAX's own service, which comes next: whoever reaches that address and says that it is process 1 is taken for it, so
the address belongs into a private network. A silent or slow connection delays nobody: each has a deadline.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxpar.cluster.environment import Cluster
from jaxpar.cluster.peers import ANSWER, RULE, Peer, Peers, problem_of
from jaxpar.errors import JaxparError, Problem, refuse


def host_rendezvous(cluster: Cluster, *, bind: str, until: float, same: str, word: str = "") -> None:
    """Waits, as process 0, until all the others have come.

    Args:
      cluster: As process 0 sees it.
      bind: Address to listen on, host:port.
      until: When to give up, by `time.monotonic`.
      same: Text that all must send alike, such as the hash of the job.
      word: Text that is sent to all; each answers whether it has a problem with it.

    Raises:
      JaxparError: If it cannot listen, some did not come, one does not fit, or has a problem with the word; the others
        get the same error.
    """
    with _listening(cluster, bind) as server:
        peers, problem = Peers(cluster, same), None
        while problem is None:  # again, where a process was lost between coming and answering
            problem = peers.gather(server, until) or peers.ask(word)
            if not peers.missing():
                break
        peers.answer(problem)
    if problem:
        raise _refused(cluster, problem)


def _listening(cluster: Cluster, bind: str) -> socket.socket:
    """Returns a socket that listens at an address of this machine."""
    host, _, port = bind.rpartition(":")
    try:
        kind, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        server = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as error:
        raise _lost(
            cluster, f"{host} is no address: {error.strerror}", "a name or an address of this machine"
        ) from error
    server.setblocking(False)
    # the port of an attempt that ended a moment ago is in TIME_WAIT, and the next attempt needs it
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind(where)
        server.listen(cluster.processes)
    except OSError as error:
        server.close()
        fix = "a free port of this machine in the coordinator's address; or process 0 is meant to run elsewhere"
        raise _lost(cluster, f"cannot listen on {bind}: {error.strerror}", fix) from error
    return server


def join_rendezvous(
    cluster: Cluster, *, until: float, same: str, check: Callable[[str], Problem | None] = lambda word: None
) -> str:
    """Connects to process 0 and waits, as one of the others, until all have come; returns the word of process 0.

    Args:
      cluster: As this process sees it.
      until: When to give up, by `time.monotonic`.
      same: Text that all must send alike.
      check: Returns the problem that this process has with the word, if any.

    Raises:
      JaxparError: If process 0 is not found in time, or says that someone is missing or does not fit.
    """
    said = {"process": cluster.process, "processes": cluster.processes, "host": socket.gethostname(), "same": same}
    began, why = time.monotonic(), ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=left) as server:
                word, problem = _listen(server, said, until=until + ANSWER + 2.0, check=check)
            if problem:
                raise _refused(cluster, problem)
            return word
        except ValueError as error:
            if isinstance(error, JaxparError):
                raise
            why = "it hung up"  # process 0 of an earlier attempt, or another program: tried again
        except OSError as error:
            why = error.strerror or str(error)
        # process 0 may start minutes after the others, where a queue starts nodes one by one
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    seconds = time.monotonic() - began
    fix = "is process 0 running, is its host's name known here, and its port open? jaxpar doctor looks"
    raise _lost(cluster, f"no answer from the coordinator in {seconds:.1f} s: {why}", fix)


def _listen(
    server: socket.socket, said: dict[str, Any], *, until: float, check: Callable[[str], Problem | None]
) -> tuple[str, Problem | None]:
    """Returns the word of process 0, and the problem that ended the rendezvous, if any.

    Raises:
      ValueError: If the other side hangs up, or is no process 0.
      OSError: If it is gone, or silent.
    """
    # `until` is later than the deadline of process 0: so process 0 gives up first, and can say why
    word, process_0 = "", Peer(server, until)
    process_0.tell(said)
    while True:
        server.settimeout(max(0.01, until - time.monotonic()))
        if (heard := process_0.hear()) is None:
            continue
        if "word" not in heard:
            return word, problem_of(heard["problem"]) if heard.get("problem") else None
        word = str(heard["word"])
        wrong = check(word)
        process_0.tell({"problem": asdict(wrong) if wrong else None})


def _refused(cluster: Cluster, problem: Problem) -> JaxparError:
    return _lost(cluster, problem.got, problem.fix, rule=problem.rule)


def _lost(cluster: Cluster, why: str, fix: str, *, rule: str = RULE) -> JaxparError:
    me = (
        f"process {cluster.process} of {cluster.processes} on {socket.gethostname()}, coordinator {cluster.coordinator}"
    )
    return refuse(f"{me}: {why}", rule=rule, fix=fix)
