"""Process 0's side of the rendezvous: one non-blocking connection per process that has joined.

Process 0 waits for all connections with one selector, and each connection has a deadline, so that a slow process, a
port scanner or a health check does not delay the others.
"""

import json
import selectors
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpar.cluster.environment import Cluster
from jaxpar.errors import Problem

RULE = "all processes of a run reach process 0, which listens on the coordinator's address"
MOST = 4096  # maximum bytes of a line: a connection that sends more is no process of a run
INTRODUCTION = 2.0  # seconds within which a connection must say which process it is
COME = "are they started, and with this coordinator? their own output says more"
FIT = "start all processes with the same job and the same count, each with its own number"
ANSWER = 20.0  # seconds within which all must answer the word of process 0


@dataclass
class Peer:
    """A connection between process 0 and another process.

    Attributes:
      socket: The socket, non-blocking in process 0.
      until: Deadline for its next line, by `time.monotonic`.
      text: The part of the line received so far.
    """

    socket: socket.socket
    until: float
    text: bytes = b""

    def receive(self) -> dict[str, Any] | None:
        """Receives data; returns the line, or None while it is incomplete.

        Raises:
          ValueError: If the other side has closed the connection, or sent data that is not a line.
          OSError: If the connection is broken.
        """
        chunk = self.socket.recv(MOST)
        self.text += chunk
        if not chunk or len(self.text) > MOST:
            raise ValueError("no line")
        return _parse(self.text) if self.text.endswith(b"\n") else None

    def send(self, message: dict[str, Any], *, until: float = 0.0) -> None:
        """Sends a line, and sets the deadline for the answer to `until`."""
        self.text, self.until = b"", until
        try:
            self.socket.sendall(json.dumps(message).encode() + b"\n")
        except OSError:  # a broken connection raises again, with its reason, when it is read
            return


@dataclass
class Peers:
    """The processes that have joined process 0.

    Attributes:
      cluster: The cluster as process 0 sees it.
      same: Text that must be equal in all processes.
      strangers: Connections that have not yet sent their process number.
      waiting: Connections by number of the process.
      hosts: Hosts by number of the process.
      refused: Connections of processes that do not belong to the run.
    """

    cluster: Cluster
    same: str
    strangers: list[Peer] = field(default_factory=list)
    waiting: dict[int, Peer] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    refused: list[Peer] = field(default_factory=list)

    def missing(self) -> list[int]:
        """Numbers of the processes that have not joined."""
        return [number for number in range(1, self.cluster.processes) if number not in self.waiting]

    def gather(self, server: socket.socket, until: float) -> Problem | None:
        """Waits until all have joined; returns a problem if some do not, or one does not belong to the run."""
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            for peer in self.strangers:
                selector.register(peer.socket, selectors.EVENT_READ, peer)
            while self.missing():
                if time.monotonic() >= until:
                    return Problem(_absent(self.missing()), RULE, COME)
                # wakes up at the next deadline even if nobody sends anything
                next_deadline = min([until, *(peer.until for peer in self.strangers)])
                for key, _ in selector.select(max(0.0, next_deadline - time.monotonic())):
                    if key.data is None:
                        self._accept(server, selector)
                    elif (message := _receive(key.data)) is not None:
                        selector.unregister(key.fileobj)
                        self.strangers.remove(key.data)
                        if problem := self.add_peer(key.data, message):
                            return problem
                for peer in [peer for peer in self.strangers if time.monotonic() >= peer.until]:
                    selector.unregister(peer.socket)
                    self.strangers.remove(peer)
                    peer.socket.close()
        return None

    def _accept(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            connection, _ = server.accept()
        except OSError:  # already disconnected
            return
        connection.setblocking(False)
        peer = Peer(connection, time.monotonic() + INTRODUCTION)
        self.strangers.append(peer)
        selector.register(connection, selectors.EVENT_READ, peer)

    def add_peer(self, peer: Peer, message: dict[str, Any]) -> Problem | None:
        """Adds a peer; returns a problem if it does not belong to the run. Closes connections of other programs."""
        introduction = _introduction(message)
        if introduction is None:
            peer.socket.close()
            return None
        number, count, host, same = introduction
        # a restarted process joins again before its old connection has timed out: then the newer one counts
        if number in self.waiting and not _is_connected(self.waiting[number].socket):  # it was started anew
            self.waiting.pop(number).socket.close()
        name, problem = f"process {number} on {host}", ""
        if count != self.cluster.processes:
            problem = f"{name} says there are {count} processes, process 0 says {self.cluster.processes}"
        elif not 0 < number < count or number in self.waiting:
            other_host = self.hosts.get(number, socket.gethostname())
            problem = f"{name} and another on {other_host} both say they are process {number}"
        elif same != self.same:
            problem = f"{name} runs {same}, process 0 runs {self.same}"
        if problem:
            self.refused.append(peer)
            return Problem(problem, RULE, FIT)
        self.waiting[number], self.hosts[number] = peer, host
        return None

    def send_word(self, word: str) -> Problem | None:
        """Sends the word to all and waits for their answers; returns the first problem in an answer.

        If a process is lost meanwhile, it counts as missing again, and `gather` waits for its restart.
        """
        until = time.monotonic() + ANSWER
        pending = set(self.waiting)
        with selectors.DefaultSelector() as selector:
            for number, peer in self.waiting.items():
                peer.send({"word": word}, until=until)
                selector.register(peer.socket, selectors.EVENT_READ, number)
            while pending:
                if (remaining := until - time.monotonic()) <= 0:
                    return Problem(f"{_absent(sorted(pending))}: no answer to process 0", RULE, COME)
                for key, _ in selector.select(remaining):
                    if (message := _receive(self.waiting[key.data])) is None:
                        continue
                    if message.get("problem"):
                        return read_problem(message["problem"])
                    selector.unregister(key.fileobj)
                    pending.remove(key.data)
                    if "problem" not in message:  # it hung up, or answered something else
                        self.waiting.pop(key.data).socket.close()
        return None

    def finish(self, problem: Problem | None) -> None:
        """Sends every waiting process the result of the rendezvous, and closes all connections."""
        for peer in (*self.waiting.values(), *self.refused):
            peer.send({"problem": asdict(problem) if problem else None})
        for peer in (*self.strangers, *self.waiting.values(), *self.refused):
            peer.socket.close()


def _receive(peer: Peer) -> dict[str, Any] | None:
    """Receives a peer's line; None while it is incomplete, {} if the peer is gone or is another program."""
    try:
        return peer.receive()
    except (OSError, ValueError, RecursionError):
        return {}


def _introduction(message: dict[str, Any]) -> tuple[int, int, str, str] | None:
    """Parses a process's first line to (process, count, host, same); None if it comes from another program."""
    number, count, host, same = (message.get(key) for key in ("process", "processes", "host", "same"))
    types = ((number, int), (count, int), (host, str), (same, str))
    return (number, count, host, same) if all(isinstance(value, cls) for value, cls in types) else None  # pyright: ignore[reportReturnType]


def _is_connected(peer: socket.socket) -> bool:
    """Whether a peer is still connected; does not block."""
    # a peer sends nothing until it is asked: readable here means the end of the connection
    try:
        return peer.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _parse(text: bytes) -> dict[str, Any]:
    """Parses the object in a line of JSON.

    Raises:
      ValueError: If the line is not a JSON object.
    """
    message = json.loads(text)
    if not isinstance(message, dict):
        raise ValueError("no object")
    return message


def read_problem(message: object) -> Problem:
    """Returns the problem in a message from the other side of a connection."""
    message = message if isinstance(message, dict) else {}
    return Problem(*(str(message.get(key, "")) for key in ("got", "rule", "fix")))


def _absent(missing: list[int]) -> str:
    text = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"process {text} did not come" if len(missing) == 1 else f"processes {text} did not come"
