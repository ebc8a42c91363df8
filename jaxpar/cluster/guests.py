"""Those who have come to process 0 before a run, as it sees them: one connection each, none of which it waits for."""

import json
import selectors
import socket
import time
from dataclasses import asdict, dataclass, field
from typing import Any

from jaxpar.cluster.environment import Cluster
from jaxpar.errors import Problem

RULE = "all processes of a run find process 0, which listens where the coordinator's address says"
MOST = 4096  # bytes of what one process says
INTRODUCTION = 2.0  # seconds in which who connects says who it is
COME = "are they started, and with this coordinator? their own output says more"
FIT = "the same job, the same count for all, and a number of its own for each"
ANSWER = 20.0  # seconds in which all have looked at what process 0 said


@dataclass
class Guest:
    """A connection to process 0.

    Attributes:
      socket: It, which is never waited for.
      until: When it must have said its line, by `time.monotonic`.
      text: What it has said of that line.
    """

    socket: socket.socket
    until: float
    text: bytes = b""

    def hear(self) -> dict[str, Any] | None:
        """Returns the line that it said, None where it is not whole yet.

        Raises:
          ValueError: If it hung up, or says something else.
          OSError: If it is gone.
        """
        more = self.socket.recv(MOST)
        self.text += more
        if not more or len(self.text) > MOST:
            raise ValueError("no line")
        return _read(self.text) if self.text.endswith(b"\n") else None

    def tell(self, said: dict[str, Any], *, until: float = 0.0) -> None:
        """Says a line, and expects another one by then; who is gone shows when it is listened to."""
        self.text, self.until = b"", until
        try:
            self.socket.sendall(_line(said))
        except OSError:
            return


@dataclass
class Guests:
    """Those who have come to process 0.

    Attributes:
      cluster: As process 0 sees it.
      same: What all processes must say.
      strangers: Connections that have not said yet who they are.
      waiting: Process to its connection.
      hosts: Process to its host.
      refused: The connection of one that does not fit.
    """

    cluster: Cluster
    same: str
    strangers: list[Guest] = field(default_factory=list)
    waiting: dict[int, Guest] = field(default_factory=dict)
    hosts: dict[int, str] = field(default_factory=dict)
    refused: list[Guest] = field(default_factory=list)

    def missing(self) -> list[int]:
        """Returns the processes that have not come."""
        return [number for number in range(1, self.cluster.processes) if number not in self.waiting]

    def gather(self, server: socket.socket, until: float) -> Problem | None:
        """Waits until all have come, or returns why that will not be."""
        with selectors.DefaultSelector() as selector:
            selector.register(server, selectors.EVENT_READ)
            for guest in self.strangers:
                selector.register(guest.socket, selectors.EVENT_READ, guest)
            while self.missing():
                if time.monotonic() >= until:
                    return Problem(_absent(self.missing()), RULE, COME)
                next_end = min([until, *(guest.until for guest in self.strangers)])
                for key, _ in selector.select(max(0.0, next_end - time.monotonic())):
                    if key.data is None:
                        self._let_in(server, selector)
                    elif (said := _heard(key.data)) is not None:
                        selector.unregister(key.fileobj)
                        self.strangers.remove(key.data)
                        if problem := self.welcome(key.data, said):
                            return problem
                for guest in [guest for guest in self.strangers if time.monotonic() >= guest.until]:
                    selector.unregister(guest.socket)
                    self.strangers.remove(guest)
                    guest.socket.close()
        return None

    def _let_in(self, server: socket.socket, selector: selectors.BaseSelector) -> None:
        try:
            came, _ = server.accept()
        except OSError:  # it has left already
            return
        came.setblocking(False)
        guest = Guest(came, time.monotonic() + INTRODUCTION)
        self.strangers.append(guest)
        selector.register(came, selectors.EVENT_READ, guest)

    def welcome(self, guest: Guest, said: dict[str, Any]) -> Problem | None:
        """Returns why this guest ends the meeting; one that says nothing sensible is sent away."""
        introduction = _introduction(said)
        if introduction is None:
            guest.socket.close()
            return None
        number, count, host, same = introduction
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
            self.refused.append(guest)
            return Problem(problem, RULE, FIT)
        self.waiting[number], self.hosts[number] = guest, host
        return None

    def ask(self, word: str) -> Problem | None:
        """Says the word to all, and returns what is wrong with it for one; who is gone meanwhile is missing again."""
        until = time.monotonic() + ANSWER
        asked = set(self.waiting)
        with selectors.DefaultSelector() as selector:
            for number, guest in self.waiting.items():
                guest.tell({"word": word}, until=until)
                selector.register(guest.socket, selectors.EVENT_READ, number)
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
                    if "problem" not in said:
                        self.waiting.pop(key.data).socket.close()
        return None

    def answer(self, problem: Problem | None) -> None:
        """Tells everyone who waits how the meeting ended, and ends it."""
        for guest in (*self.waiting.values(), *self.refused):
            guest.tell({"problem": asdict(problem) if problem else None})
        for guest in (*self.strangers, *self.waiting.values(), *self.refused):
            guest.socket.close()


def _heard(guest: Guest) -> dict[str, Any] | None:
    """Returns what a guest said, None where that is not whole yet; nothing at all where it is gone or no guest."""
    try:
        return guest.hear()
    except (OSError, ValueError, RecursionError):
        return {}


def _introduction(said: dict[str, Any]) -> tuple[int, int, str, str] | None:
    """Returns what a process says of itself; None where it is another program's, or a probe."""
    number, count, host, same = (said.get(key) for key in ("process", "processes", "host", "same"))
    kinds = ((number, int), (count, int), (host, str), (same, str))
    return (number, count, host, same) if all(isinstance(value, kind) for value, kind in kinds) else None  # pyright: ignore[reportReturnType]


def _waits(guest: socket.socket) -> bool:
    """Returns whether one who came is still there."""
    try:
        return guest.recv(1) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _line(said: dict[str, Any]) -> bytes:
    return json.dumps(said).encode() + b"\n"


def _read(text: bytes) -> dict[str, Any]:
    """Returns what a line says.

    Raises:
      ValueError: If it is not of this meeting.
    """
    said = json.loads(text)
    if not isinstance(said, dict):
        raise ValueError("no object")
    return said


def problem_of(said: Any) -> Problem:
    """Returns a problem as the other side of a connection said it."""
    said = said if isinstance(said, dict) else {}
    return Problem(*(str(said.get(key, "")) for key in ("got", "rule", "fix")))


def _absent(missing: list[int]) -> str:
    shown = ", ".join(map(str, missing[:8])) + (f" and {len(missing) - 8} more" if len(missing) > 8 else "")
    return f"process {shown} did not come" if len(missing) == 1 else f"processes {shown} did not come"
