"""Checks that all processes are there before JAX connects them: JAX ends them without saying which one is missing.

    others ──{process, processes, host, same}──► process 0, which waits for all of them
           ◄──────────── {word} ───────────────  once all have come: what it says to all, such as the attempt's name
           ──────── {problem or none} ─────────► what is wrong with it, such as a folder that is not seen here
           ◄─────── {problem or none} ─────────  all go on; or the reason why not, the same for all of them

Takes place at the coordinator's own address, which process 0 gives free again for JAX. Whoever reaches that address
and says that it is process 1 is taken for it, here as in JAX's own service, which comes next: it belongs into a
network of one's own. A stranger who is silent or slow holds up nobody: each connection has a deadline.
"""

import socket
import time
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from jaxpar.cluster.environment import Cluster
from jaxpar.cluster.guests import ANSWER, RULE, Guest, Guests, problem_of
from jaxpar.errors import JaxparError, Problem, refuse


def host_meeting(cluster: Cluster, *, bind: str, until: float, same: str, word: str = "") -> None:
    """Waits, as process 0, until all the others have come.

    Args:
      cluster: As process 0 sees it.
      bind: Address to listen on, host:port.
      until: When to give up, by `time.monotonic`.
      same: What all must run, in words, such as the hash of the job.
      word: What all are told; each says what is wrong with it.

    Raises:
      JaxparError: If it cannot listen, some did not come, one does not fit, or finds the word wrong; the others are
        told the same.
    """
    with _listening(cluster, bind) as server:
        guests, problem = Guests(cluster, same), None
        while problem is None:
            problem = guests.gather(server, until) or guests.ask(word)
            if not guests.missing():
                break
        guests.answer(problem)
    if problem:
        raise _told(cluster, problem)


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
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what lingers is no one
    try:
        server.bind(where)
        server.listen(cluster.processes)
    except OSError as error:
        server.close()
        fix = "a free port of this machine in the coordinator's address; or process 0 is meant to run elsewhere"
        raise _lost(cluster, f"cannot listen on {bind}: {error.strerror}", fix) from error
    return server


def go_to_meeting(
    cluster: Cluster, *, until: float, same: str, check: Callable[[str], Problem | None] = lambda word: None
) -> str:
    """Goes to process 0 and waits, as one of the others, until all have come; returns the word of process 0.

    Args:
      cluster: As this process sees it.
      until: When to give up, by `time.monotonic`.
      same: What this process runs, in words.
      check: From the word to what is wrong with it here.

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
                raise _told(cluster, problem)
            return word
        except ValueError as error:
            if isinstance(error, JaxparError):
                raise
            why = "it hung up"  # between two runs, or no process of jaxpar
        except OSError as error:
            why = error.strerror or str(error)
        time.sleep(min(0.2, max(0.0, until - time.monotonic())))
    seconds = time.monotonic() - began
    fix = "is process 0 running, is its host's name known here, and its port open? jaxpar doctor looks"
    raise _lost(cluster, f"no answer from the coordinator in {seconds:.1f} s: {why}", fix)


def _listen(
    server: socket.socket, said: dict[str, Any], *, until: float, check: Callable[[str], Problem | None]
) -> tuple[str, Problem | None]:
    """Returns the word of process 0, and how the meeting ended; process 0 gives up first, and says why.

    Raises:
      ValueError: If the other side hangs up, or is no process 0.
      OSError: If it is gone, or silent.
    """
    word, process_0 = "", Guest(server, until)
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


def _told(cluster: Cluster, problem: Problem) -> JaxparError:
    return _lost(cluster, problem.got, problem.fix, rule=problem.rule)


def _lost(cluster: Cluster, why: str, fix: str, *, rule: str = RULE) -> JaxparError:
    me = (
        f"process {cluster.process} of {cluster.processes} on {socket.gethostname()}, coordinator {cluster.coordinator}"
    )
    return refuse(f"{me}: {why}", rule=rule, fix=fix)
