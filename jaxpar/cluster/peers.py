"""The processes that have come to the rendezvous, as process 0 sees them: one non-blocking connection each.

Process 0 waits for all of them at once with a selector, and each connection has a deadline. So a process that is slow,
a port scanner or a health check delays nobody.
"""

import json
import selectors
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpar.cluster.environment import Cluster
from jaxpar.errors import Problem

RULE = "all processes of a run find process 0, which listens where the coordinator's address says"
MOST = 4096  # bytes of a line: a stranger that sends more is no process of a run
INTRODUCTION = 2.0  # seconds within which a connection must say which process it is
COME = "are they started, and with this coordinator? their own output says more"
FIT = "the same job, the same count for all, and a number of its own for each"
ANSWER = 20.0  # seconds within which all must answer the word of process 0


@dataclass
class Peer:
    """A connection between process 0 and another process.

    Attributes:
      socket: The socket, which process 0 never blocks on.
      until: When its line must have arrived, by `time.monotonic`.
      text: The part of the line that has arrived.
    """

    socket: socket.socket
    until: float
    text: bytes = b""

    def hear(self) -> dict[str, Any] | None:
        """Returns the line that has arrived, None while it is incomplete.

        Raises:
          ValueError: If the other side hung up, or sent something else.
          OSError: If the connection is broken.
        """
        more = self.socket.recv(MOST)
        self.text += more
        if not more or len(self.text) > MOST:
            raise ValueError("no line")
        return _read(self.text) if self.text.endswith(b"\n") else None

    def tell(self, said: dict[str, Any], *, until: float = 0.0) -> None:
        """Sends a line, and expects another one in return until then."""
        self.text, self.until = b"", until
        try:
            self.socket.sendall(_line(said))
        except OSError:  # a connection that is broken shows again, with its reason, when it is read
            return


@dataclass
class Peers:
    """The processes that have come to process 0.

    Attributes:
      cluster: As process 0 sees it.
      same: Text that all processes must send alike.
      strangers: Connections that have not said yet which process they are.
      waiting: Process to its connection.
      hosts: Process to its host.
      refused: The connection of a process that does not fit.
    """

    cluster: Cluster
    same: str
    strangers: list[Peer] = field(default_factory=list)
    waiting: dict[int, Peer] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    refused: list[Peer] = field(default_factory=list)

    def missing(self) -> list[int]:
        """Returns the numbers of the processes that have not come."""
        return [number for number in range(1, self.cluster.processes) if number not in self.waiting]

    def gather(self, server: socket.socket, until: float) -> Problem | None:
        """Waits until all have come; returns the problem if they do not, or one does not fit."""
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            for peer in self.strangers:
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            while self.missing():
                if time.monotonic() >= until:
                    return Problem(_absent(self.missing()), RULE, COME)
                # wakes up at the next deadline too, when nobody sends anything
                next_end = min([until, *(peer.until for peer in self.strangers)])
                for key, _ in selector.select(max(0.0, next_end - time.monotonic())):
                    if key.data is None:
                        self._accept(server, selector)
                    elif (said := _heard(key.data)) is not None:
                        selector.unregister(key.fileobj)
                        self.strangers.remove(key.data)
                        if problem := self.welcome(key.data, said):
                            return problem
                for peer in [peer for peer in self.strangers if time.monotonic() >= peer.until]:
                    selector.unregister(peer.socket)
                    self.strangers.remove(peer)
                    peer.socket.close()
        return None

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            came, _ = server.accept()
        except OSError:  # it has left already
            return
        came.setblocking(False)
        peer = Peer(came, time.monotonic() + INTRODUCTION)
        self.strangers.append(peer)
        selector.register(came, selectors.EVENT_READ, peer)

    def welcome(self, peer: Peer, said: dict[str, Any]) -> Problem | None:
        """Adds a peer; returns the problem if it does not fit. A connection of another program is closed."""
        introduction = _introduction(said)
        if introduction is None:
            peer.socket.close()
            return None
        number, count, host, same = introduction
        # a process that was restarted comes again before its old connection has timed out: then the newer one counts
        if number in self.waiting and not _waits(self.waiting[number].socket):  # it was started anew
            self.waiting.pop(number).socket.close()
        who, problem = f"process {number} on {host}", ""
        if count != self.cluster.processes:
            problem = f"{who} says there are {count} processes, process 0 says {self.cluster.processes}"
        elif not 0 < number < count or number in self.waiting:
            other = self.hosts.get(number, socket.gethostname())
            problem = f"{who} and another on {other} both say they are process {number}"
        elif same != self.same:
            problem = f"{who} runs {same}, process 0 runs {self.same}"
        if problem:
            self.refused.append(peer)
            return Problem(problem, RULE, FIT)
        self.waiting[number], self.hosts[number] = peer, host
        return None

    def ask(self, word: str) -> Problem | None:
        """Sends the word to all and waits for their answers; returns the first problem that one has with it.

        A process that is gone meanwhile is missing again, so that `gather` waits for its restart.
        """
        until = time.monotonic() + ANSWER
        asked = set(self.waiting)
        with selectors.DefaultSelector() as selector:
            for number, peer in self.waiting.items():
                peer.tell({"word": word}, until=until)
                selector.register(peer.socket, selectors.EVENT_READ, number)
            while asked:
                if (left := until - time.monotonic()) <= 0:
                    return Problem(f"{_absent(sorted(asked))} so far as to answer", RULE, COME)
                for key, _ in selector.select(left):
                    if (said := _heard(self.waiting[key.data])) is None:
                        continue
                    if said.get("problem"):
                        return problem_of(said["problem"])
                    selector.unregister(key.fileobj)
                    asked.remove(key.data)
                    if "problem" not in said:  # it hung up, or answers something else
                        self.waiting.pop(key.data).socket.close()
        return None

    def answer(self, problem: Problem | None) -> None:
        """Tells every waiting process how the rendezvous ended, and closes all connections."""
        for peer in (*self.waiting.values(), *self.refused):
            peer.tell({"problem": asdict(problem) if problem else None})
        for peer in (*self.strangers, *self.waiting.values(), *self.refused):
            peer.socket.close()


def _heard(peer: Peer) -> dict[str, Any] | None:
    """Returns the line of a peer, None while it is incomplete; {} where it is gone, or is no process of a run."""
    try:
        return peer.hear()
    except (OSError, ValueError, RecursionError):
        return {}


def _introduction(said: dict[str, Any]) -> tuple[int, int, str, str] | None:
    """Returns (process, count, host, same) of an introduction; None where it is another program's, or a probe."""
    number, count, host, same = (said.get(key) for key in ("process", "processes", "host", "same"))
    kinds = ((number, int), (count, int), (host, str), (same, str))
    return (number, count, host, same) if all(isinstance(value, kind) for value, kind in kinds) else None  # pyright: ignore[reportReturnType]


def _waits(peer: socket.socket) -> bool:
    """Returns whether a peer is still connected, without blocking."""
    # a peer sends nothing until it is asked: where there is something to read, that is the end of the connection
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _read(text: bytes) -> dict[str, Any]:
    """Returns the object in a line of JSON.

    Raises:
      ValueError: If it is not one.
    """
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError("no object")
    return said


def problem_of(said: Any) -> Problem:
    """Returns a problem as the other side of a connection sent it."""
    said = said if isinstance(said, dict) else {}
    return Problem(*(str(said.get(key, "")) for key in ("got", "rule", "fix")))


def _absent(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"process {shown} did not come" if len(missing) == 1 else f"processes {shown} did not come"
