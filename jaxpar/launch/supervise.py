"""The supervisor: starts the processes of a job, reports which one ended first and how, and restarts them.

    start n ─► all end with 0 ─► done
       ▲        one refuses its input (status 1) ─► all end: another attempt would end the same way
       └─────── one is killed, lost or crashes ─► all are killed; restart from the newest good checkpoint,
                                                  without a process that failed twice before a new checkpoint

It trains nothing and holds no device. The processes find each other by `JAXPAR_COORDINATOR`,
`JAXPAR_PROCESSES`, `JAXPAR_PROCESS`; they end with it, whatever ends it (`lifeline.py`).
"""

import dataclasses
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from jaxpar.errors import LOST, STOPPED, JaxparError, refuse
from jaxpar.launch.lifeline import VARIABLE, lifeline
from jaxpar.leaving import stop_signals

_NOISE = "[Gloo] Rank "  # Gloo prints a line for every connection, on every process
_CONSEQUENCES = (-signal.SIGABRT, LOST, 0)
GRACE = 5.0  # seconds in which the others may print why they end, before they are killed


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes to start, and how often.

    Attributes:
      command: Arguments of `jaxpar`, such as `train job.toml`.
      options: Further arguments, after all others.
      processes: Number of processes on this machine.
      restarts: Attempts in a row that may make no progress, after the first.
      nodes: Number of machines, each of which starts as many processes.
      node: The number of this one.
      coordinator: `host:port` of process 0; on one machine a free port of its own.
      ended: Called with the end of a process of this machine that failed, to report it to the others.
      fewer: From a command and its number of processes to a smaller number that it can run with, and further arguments.
    """

    command: Sequence[str]
    processes: int
    options: Sequence[str] = ()
    restarts: int = 3
    nodes: int = 1
    node: int = 0
    coordinator: str = ""
    ended: Callable[["Ended"], None] = lambda ended: None
    fewer: Callable[[Sequence[str], int], tuple[int, list[str]]] | None = None

    def __post_init__(self):
        for key, low in (("processes", 1), ("restarts", 0), ("nodes", 1), ("node", 0)):
            if getattr(self, key) < low:
                raise refuse(f"{key} = {getattr(self, key)}", rule=f"{key} is at least {low}", fix=f"--{key} {low}")
        if self.node >= self.nodes:
            raise refuse(f"node {self.node} of {self.nodes}", rule="nodes are numbered from 0", fix="--node 0")
        if self.nodes > 1 and not self.coordinator:
            raise refuse(
                f"{self.nodes} nodes without a coordinator",
                rule="with several nodes, each is given the address of process 0",
                fix="--coordinator HOST:PORT of node 0, on every node",
            )


@dataclass
class Ended:
    """The end of a process.

    Attributes:
      process: Its number.
      pid: Its process id on this machine.
      status: Its exit status, negative for a signal.
      seconds: Seconds since its start.
    """

    process: int
    pid: int
    status: int
    seconds: float

    @property
    def how(self) -> str:
        """`was killed by SIGKILL`."""
        return f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with {self.status}"

    def __str__(self) -> str:
        return f"process {self.process} (host {socket.gethostname()}) {self.how} after {self.seconds:.1f} s"


@dataclass
class Attempt:
    """One start of all processes of this machine."""

    launch: Launch
    number: int
    say: Callable[[str], None]
    children: dict[int, subprocess.Popen] = field(default_factory=dict)
    ended: list[Ended] = field(default_factory=list)

    def run(self, stop: "Stop") -> list[Ended]:
        """Returns how the processes ended, the first to fail first."""
        with lifeline() as end:
            return self._run(stop, end)

    def _run(self, stop: "Stop", end: int) -> list[Ended]:
        begin = time.monotonic()
        coordinator = self.launch.coordinator or f"127.0.0.1:{free_port()}"
        first = self.launch.node * self.launch.processes
        readers = []
        try:
            for process in range(first, first + self.launch.processes):
                child = self._start(process, coordinator, end)
                self.children[process] = child
                readers += [threading.Thread(target=self._pass_on, args=(process, pipe, out), daemon=True)
                            for pipe, out in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))]  # fmt: skip
            for reader in readers:
                reader.start()
            deadline = None
            while len(self.ended) < len(self.children):
                self._collect(begin)
                if stop.name:
                    stop.pass_on(self.children.values())
                failed = [each for each in self.ended if each.status and each.status not in STOPPED.values()]
                if failed and deadline is None:
                    deadline = time.monotonic() + GRACE
                    self.say(str(failed[0]))
                    self.launch.ended(failed[0])
                if deadline and time.monotonic() > deadline:
                    self._kill()
                time.sleep(0.05)
        finally:
            self._kill()
            for reader in readers:
                reader.join(timeout=5)
        return self.ended

    def _start(self, process: int, coordinator: str, end: int) -> subprocess.Popen:
        total = self.launch.nodes * self.launch.processes
        own = {"COORDINATOR": coordinator, "PROCESSES": str(total), "PROCESS": str(process)}
        own["ATTEMPT"] = str(self.number)  # of this supervisor: which one all begin is settled when they meet
        return subprocess.Popen(
            [sys.executable, "-m", "jaxpar", *self.launch.command, *self.launch.options],
            env={**os.environ, **{f"JAXPAR_{name}": value for name, value in own.items()}, VARIABLE: str(end)},
            pass_fds=(end,),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C reaches the supervisor, which passes it on
        )  # fmt: skip

    def _pass_on(self, process: int, pipe: Any, out: Any) -> None:
        for line in pipe:
            if line.startswith(_NOISE):
                continue
            with suppress(OSError, ValueError):  # nobody reads this any more: the process must not wait for it
                print(f"{f'[{process}] ' if process or out is sys.stderr else ''}{line}", end="", file=out, flush=True)
        pipe.close()

    def _collect(self, begin: float) -> None:
        known, now = {each.process for each in self.ended}, time.monotonic() - begin
        new = [
            Ended(process, child.pid, status, now)
            for process, child in self.children.items()
            if process not in known and (status := child.poll()) is not None
        ]
        # where a connection breaks, Gloo and JAX abort: who did not abort ended first
        self.ended += sorted(new, key=lambda each: each.status in _CONSEQUENCES)

    def _kill(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
                child.wait()


@dataclass
class Stop:
    """A signal to the supervisor, passed on to the processes once; they then agree on a last step."""

    name: str = ""
    told: bool = False

    def __call__(self, number: int, _frame) -> None:
        """Notes a signal."""
        self.name, self.told = signal.Signals(number).name, False

    def pass_on(self, children) -> None:
        """Passes the signal on to the processes, once."""
        if not self.told:
            self.told = True
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.Signals[self.name])


def supervise(launch: Launch, *, progress: Callable[[], int], say: Callable[[str], None]) -> dict[str, Any]:
    """Runs the processes until they end well, refuse their input, or fail too often.

    Args:
      launch: The processes to start.
      progress: Returns the step of the newest checkpoint, or -1; progress forgives earlier failures.
      say: Prints a line for the user.

    Returns:
      `status` of the verb, `attempts`: for each, the processes as they ended.
    """
    stop = Stop()
    before = {number: signal.signal(number, stop) for number in stop_signals()}
    attempts: list[list[Ended]] = []
    left, reached, before_last = launch.restarts, progress(), -1
    try:
        while True:
            ended = Attempt(launch, len(attempts), say).run(stop)
            attempts.append(ended)
            failed = [each for each in ended if each.status]
            if not failed:
                return _outcome(0, attempts)
            if refused := next((each for each in ended if each.status == JaxparError.status), None):
                say(f"process {refused.process} refused what it was given: not started again")
                return _outcome(1, attempts)
            if stopped := next((each.status for each in failed if each.status in STOPPED.values()), 0):
                return _outcome(stopped, attempts)  # on purpose, and saved
            if stop.name:
                return _outcome(1, attempts)
            if (now := progress()) > reached:
                left, reached = launch.restarts, now
            if not left:
                say(f"ended after {len(attempts)} attempts, {launch.restarts + 1} in a row without a new checkpoint")
                return _outcome(1, attempts)
            left -= 1
            again = len(attempts) > 1 and _culprit(attempts[-2]) == _culprit(ended) and now <= before_last
            before_last = now
            if again and launch.nodes == 1 and launch.processes > 1 and launch.fewer is not None:
                launch = _without_one(launch, say)
            say(f"attempt {len(attempts) + 1}" + (f", from step {now}" if now >= 0 else ", from the start"))
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _culprit(ended: list[Ended]) -> int | None:
    return next((each.process for each in ended if each.status), None)


def _without_one(launch: Launch, say: Callable[[str], None]) -> Launch:
    """Returns the launch with fewer processes, or unchanged where the job cannot run with fewer."""
    try:
        count, words = launch.fewer(launch.command, launch.processes)  # pyright: ignore[reportOptionalCall]
    except JaxparError as error:
        for problem in error.problems:
            say(f"not on fewer processes: {problem}")
        return launch
    say(f"one of {launch.processes} processes seems to be gone for good: on with {count}, {' '.join(words)}")
    return dataclasses.replace(launch, processes=count, command=[*launch.command, *words])


def _outcome(status: int, attempts: list[list[Ended]]) -> dict[str, Any]:
    return {"status": status, "attempts": [[vars(each) for each in ended] for ended in attempts]}


def free_port() -> int:
    """Returns a port of this machine that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
