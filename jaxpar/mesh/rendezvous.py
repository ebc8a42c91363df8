"""Who is there, before JAX is asked to connect them: it ends a process where one is missing, without saying which.

others ──{process, processes, host, same}──► process 0, which waits for all of them
       ◄── "" : all came, go on; or the reason why not, the same for all of them

Takes place at the coordinator's own address, which process 0 gives free again for JAX.
"""

import json
import socket
import time
from dataclasses import dataclass, field

from jaxpar.errors import JaxparError, refuse
from jaxpar.mesh.processes import Cluster

RULE = "all processes of a run find process 0, which listens where the coordinator's address says"
MOST = 4096  # bytes of what one process says


@dataclass
class Guests:
    """Those who have come to process 0.

    Attributes:
      cluster: As process 0 sees it.
      same: What all processes must say.
      waiting: Process to its open connection.
      hosts: Process to its host.
    """

    cluster: Cluster
    same: str
    waiting: dict[int, socket.socket] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)

    def missing(self) -> list[int]:
        """Returns the processes that have not come."""
        return [number for number in range(1, self.cluster.processes) if number not in self.waiting]

    def welcome(self, guest: socket.socket) -> str:
        """Returns why this guest ends the meeting, or ""; one that says nothing sensible is sent away."""
        said = _introduction(guest)
        if said is None:
            guest.close()
            return ""
        number, count, host, same = said
        if number in self.waiting and not _waits(self.waiting[number]):  # it was started anew
            self.waiting.pop(number).close()
        who = f"process {number} on {host}"
        problem = ""
        if count != self.cluster.processes:
            problem = f"{who} says there are {count} processes, process 0 says {self.cluster.processes}"
        elif not 0 < number < count or number in self.waiting:
            other = self.hosts.get(number, socket.gethostname())
            problem = f"{who} and another on {other} both say they are process {number}"
        elif same != self.same:
            problem = f"{who} runs {same}, process 0 runs {self.same}"
        self.waiting[-len(self.waiting) - 1 if problem else number] = guest
        self.hosts[number] = host
        return problem

    def answer(self, text: str) -> None:
        """Tells everyone who waits."""
        for guest in self.waiting.values():
            with guest:
                try:
                    guest.sendall(text.encode() + b"\n")
                except OSError:  # it is gone: that shows when JAX connects
                    continue


def host_meeting(cluster: Cluster, *, bind: str, until: float, same: str) -> None:
    """Waits, as process 0, until all the others have come.

    Args:
      cluster: As process 0 sees it.
      bind: Address to listen on, host:port.
      until: When to give up, by `time.monotonic`.
      same: What all must run, in words, such as the hash of the job.

    Raises:
      JaxparError: If it cannot listen, some did not come, or one does not fit; the others are told the same.
    """
    guests = Guests(cluster, same)
    host, _, port = bind.rpartition(":")
    try:
        kind, _, _, _, where = socket.getaddrinfo(host.strip("[]"), int(port), type=socket.SOCK_STREAM)[0]
        server = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as error:
        raise _lost(
            cluster, f"{host} is no address: {error.strerror}", "a name or an address of this machine"
        ) from error
    with server:
        server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as servers do: what lingers is no one
        try:
            server.bind(where)
            server.listen(cluster.processes)
        except OSError as error:
            fix = "a free port of this machine in the coordinator's address; or process 0 is meant to run elsewhere"
            raise _lost(cluster, f"cannot listen on {bind}: {error.strerror}", fix) from error
        problem = ""
        while not problem and guests.missing():
            if (left := until - time.monotonic()) <= 0:
                problem = _absent(guests.missing())
                break
            server.settimeout(left)
            try:
                problem = guests.welcome(server.accept()[0])
            except TimeoutError:
                continue
        guests.answer(problem)
    if problem:
        raise _told(cluster, problem)


def go_to_meeting(cluster: Cluster, *, until: float, same: str) -> None:
    """Goes to process 0 and waits, as one of the others, until all have come.

    Raises:
      JaxparError: If process 0 is not found in time, or says that someone is missing or does not fit.
    """
    said = {"process": cluster.process, "processes": cluster.processes, "host": socket.gethostname(), "same": same}
    began, why = time.monotonic(), ""
    while (left := until - time.monotonic()) > 0:
        try:
            with socket.create_connection((cluster.host, cluster.port), timeout=left) as server:
                server.sendall(json.dumps(said).encode() + b"\n")
                server.settimeout(max(0.01, until - time.monotonic()) + 2.0)  # process 0 gives up first, and says why
                problem = _line(server)
            if problem:
                raise _told(cluster, problem)
            return
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


def _introduction(guest: socket.socket) -> tuple[int, int, str, str] | None:
    """Returns what a process says of itself; None where it is another program's, or a probe."""
    try:
        guest.settimeout(2.0)
        said = json.loads(_line(guest))
        number, count, host, same = (said[key] for key in ("process", "processes", "host", "same"))
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    kinds = ((number, int), (count, int), (host, str), (same, str))
    return (number, count, host, same) if all(isinstance(value, kind) for value, kind in kinds) else None


def _waits(guest: socket.socket) -> bool:
    """Returns whether one who came is still there."""
    guest.setblocking(False)
    try:
        return guest.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        guest.setblocking(True)


def _line(peer: socket.socket) -> str:
    """Returns the line that the other side sends.

    Raises:
      ValueError: If it hangs up before, or does not end.
    """
    text = b""
    while not text.endswith(b"\n"):
        more = peer.recv(MOST)
        if not more or len(text) > MOST:
            raise ValueError("no line")
        text += more
    return text.decode().strip()


def _absent(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"process {shown} did not come" if len(missing) == 1 else f"processes {shown} did not come"


def _told(cluster: Cluster, problem: str) -> JaxparError:
    if "did not come" in problem:
        return _lost(cluster, problem, "are they started, and with this coordinator? their own output says more")
    return _lost(cluster, problem, "the same job, the same count for all, and a number of its own for each")


def _lost(cluster: Cluster, why: str, fix: str) -> JaxparError:
    me = (
        f"process {cluster.process} of {cluster.processes} on {socket.gethostname()}, coordinator {cluster.coordinator}"
    )
    return refuse(f"{me}: {why}", rule=RULE, fix=fix)
