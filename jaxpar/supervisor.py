"""The supervisor starts the processes of a job, reports the first that fails, and restarts them.

    start n ─► all end with 0 ─► done
       ▲        one refuses its input (status 1) ─► all end: another attempt would end the same way
       └─────── one is killed, lost or crashes ─► all are killed; restart from the newest good checkpoint,
                                                  without a process that failed twice before a new checkpoint

It does not train and holds no device. The processes find each other through `JAXPAR_COORDINATOR`, `JAXPAR_PROCESSES`
and `JAXPAR_PROCESS`. They end when the supervisor ends, even if it is killed (`process_exit.py`).
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
from typing import Any, TextIO

from jaxpar.errors import LOST, STOPPED, JaxparError, refuse
from jaxpar.process_exit import LIFELINE, lifeline, stop_signals

_NOISE = "[Gloo] Rank "  # Gloo prints a line for every connection, on every process
_CONSEQUENCES = (-signal.SIGABRT, LOST, 0)
GRACE = 5.0  # seconds in which the other processes may print why they end, before they are killed


@dataclass(frozen=True, kw_only=True)
class Launch:
    """The processes to start, and the number of restarts.

    Attributes:
      command: Arguments of `jaxpar`, such as `train job.toml`.
      options: Further arguments, after all others.
      processes: Number of processes on this machine.
      restarts: Maximum number of restarts in a row without a new checkpoint.
      nodes: Number of machines, each of which starts the same number of processes.
      node: Number of this machine.
      coordinator: `host:port` of process 0; on one machine a free port by default.
      on_failure: Called with the `ProcessExit` of a failed process of this machine, to report it to the other machines.
      shrink: Maps a command and its number of processes to a smaller number that the job supports, and more arguments.
    """

    command: Sequence[str]
    processes: int
    options: Sequence[str] = ()
    restarts: int = 3
    nodes: int = 1
    node: int = 0
    coordinator: str = ""
    on_failure: Callable[["ProcessExit"], None] = lambda ended: None
    shrink: Callable[[Sequence[str], int], tuple[int, list[str]]] | None = None

    def __post_init__(self):
        for key, low in (("processes", 1), ("restarts", 0), ("nodes", 1), ("node", 0)):
            if getattr(self, key) < low:
                raise refuse(f"{key} = {getattr(self, key)}", rule=f"{key} is at least {low}", fix=f"--{key} {low}")
        if self.node >= self.nodes:
            raise refuse(f"node {self.node} of {self.nodes}", rule="nodes are numbered from 0", fix="--node 0")
        if self.nodes > 1 and not self.coordinator:
            raise refuse(
                f"{self.nodes} nodes without a coordinator",
                rule="with several nodes, each needs the address of process 0",
                fix="--coordinator HOST:PORT of node 0, on every node",
            )


@dataclass
class ProcessExit:
    """The end of a process.

    Attributes:
      process: Number of the process.
      pid: Its process id on this machine.
      status: Its exit status, negative for a signal.
      seconds: Seconds from its start.
    """

    process: int
    pid: int
    status: int
    seconds: float

    @property
    def description(self) -> str:
        """Description of the end, e.g. `was killed by SIGKILL`."""
        return f"was killed by {signal.Signals(-self.status).name}" if self.status < 0 else f"ended with {self.status}"

    def __str__(self) -> str:
        return f"process {self.process} (host {socket.gethostname()}) {self.description} after {self.seconds:.1f} s"


@dataclass
class Attempt:
    """One start of all processes of this machine."""

    launch: Launch
    number: int
    say: Callable[[str], None]
    children: dict[int, subprocess.Popen] = field(default_factory=dict)
    exits: list[ProcessExit] = field(default_factory=list)

    def run(self, stop: "SupervisorStop") -> list[ProcessExit]:
        """Starts the processes and waits for all of them; returns their exits, the first failure first."""
        with lifeline() as end:
            return self._run(stop, end)

    def _run(self, stop: "SupervisorStop", end: int) -> list[ProcessExit]:
        begin = time.monotonic()
        coordinator = self.launch.coordinator or f"127.0.0.1:{free_port()}"
        first = self.launch.node * self.launch.processes
        readers = []
        try:
            for process in range(first, first + self.launch.processes):
                child = self._start(process, coordinator, end)
                self.children[process] = child
                readers += [threading.Thread(target=self._forward_output, args=(process, pipe, out), daemon=True)
                            for pipe, out in ((child.stdout, sys.stdout), (child.stderr, sys.stderr))]  # fmt: skip
            for reader in readers:
                reader.start()
            deadline = None
            while len(self.exits) < len(self.children):
                self._collect(begin)
                if stop.name:
                    stop.forward(self.children.values())
                failures = [record for record in self.exits if record.status and record.status not in STOPPED.values()]
                if failures and deadline is None:
                    deadline = time.monotonic() + GRACE
                    self.say(str(failures[0]))
                    self.launch.on_failure(failures[0])
                if deadline and time.monotonic() > deadline:
                    self._kill()
                time.sleep(0.05)
        finally:
            self._kill()
            for reader in readers:
                reader.join(timeout=5)
        return self.exits

    def _start(self, process: int, coordinator: str, end: int) -> subprocess.Popen:
        total = self.launch.nodes * self.launch.processes
        variables = {"COORDINATOR": coordinator, "PROCESSES": str(total), "PROCESS": str(process)}
        variables["ATTEMPT"] = str(self.number)  # this machine counts; process 0 decides which attempt all begin
        return subprocess.Popen(
            [sys.executable, "-m", "jaxpar", *self.launch.command, *self.launch.options],
            env={**os.environ, **{f"JAXPAR_{name}": value for name, value in variables.items()}, LIFELINE: str(end)},
            pass_fds=(end,),
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
            start_new_session=True,  # Ctrl-C reaches the supervisor, which passes it on
        )  # fmt: skip

    def _forward_output(self, process: int, pipe: TextIO, out: TextIO) -> None:
        for line in pipe:
            if line.startswith(_NOISE):
                continue
            with suppress(OSError, ValueError):  # nobody reads this any more: the process must not wait for it
                print(f"{f'[{process}] ' if process or out is sys.stderr else ''}{line}", end="", file=out, flush=True)
        pipe.close()

    def _collect(self, begin: float) -> None:
        collected_processes, seconds = {record.process for record in self.exits}, time.monotonic() - begin
        new_records = [
            ProcessExit(process, child.pid, status, seconds)
            for process, child in self.children.items()
            if process not in collected_processes and (status := child.poll()) is not None
        ]
        # if a connection breaks, Gloo and JAX abort: a process that did not abort ended first
        self.exits += sorted(new_records, key=lambda record: record.status in _CONSEQUENCES)

    def _kill(self) -> None:
        for child in self.children.values():
            if child.poll() is None:
                child.kill()
                child.wait()


@dataclass
class SupervisorStop:
    """Passes a signal to the supervisor on to the processes, once; they then agree on a last step."""

    name: str = ""
    forwarded: bool = False

    def __call__(self, number: int, _frame) -> None:
        """Records a signal."""
        self.name, self.forwarded = signal.Signals(number).name, False

    def forward(self, children) -> None:
        """Passes the signal on to the processes, once."""
        if not self.forwarded:
            self.forwarded = True
            for child in children:
                if child.poll() is None:
                    child.send_signal(signal.Signals[self.name])


def supervise(launch: Launch, *, progress: Callable[[], int], log: Callable[[str], None]) -> dict[str, Any]:
    """Runs the processes until they succeed, refuse their input, or fail too often.

    Args:
      launch: The processes to start.
      progress: Returns the step of the newest checkpoint, or -1; a new checkpoint resets the count of failures.
      log: Prints a line for the user.

    Returns:
      `status`, the exit status of the command, and `attempts`: for each attempt, the exits of its processes.
    """
    stop = SupervisorStop()
    handlers = {number: signal.signal(number, stop) for number in stop_signals()}
    attempts: list[list[ProcessExit]] = []
    retries, best_step, previous_step = launch.restarts, progress(), -1
    try:
        while True:
            records = Attempt(launch, len(attempts), log).run(stop)
            attempts.append(records)
            failures = [record for record in records if record.status]
            if not failures:
                return _outcome(0, attempts)
            if refusal := next((record for record in records if record.status == JaxparError.status), None):
                log(f"process {refusal.process} refused its input: not started again")
                return _outcome(1, attempts)
            if stop_status := next((record.status for record in failures if record.status in STOPPED.values()), 0):
                return _outcome(stop_status, attempts)  # stopped on purpose, and saved
            if stop.name:
                return _outcome(1, attempts)
            if (step := progress()) > best_step:
                retries, best_step = launch.restarts, step
            if not retries:
                log(f"ended after {len(attempts)} attempts, {launch.restarts + 1} in a row without a new checkpoint")
                return _outcome(1, attempts)
            retries -= 1
            same_culprit = len(attempts) > 1 and _culprit(attempts[-2]) == _culprit(records) and step <= previous_step
            previous_step = step
            if same_culprit and launch.nodes == 1 and launch.processes > 1 and launch.shrink is not None:
                launch = _shrink_launch(launch, log)
            log(f"attempt {len(attempts) + 1}" + (f", from step {step}" if step >= 0 else ", from the start"))
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)


def _culprit(ended: list[ProcessExit]) -> int | None:
    return next((record.process for record in ended if record.status), None)


def _shrink_launch(launch: Launch, say: Callable[[str], None]) -> Launch:
    """Returns the launch with fewer processes, or unchanged if the job cannot run with fewer."""
    try:
        count, arguments = launch.shrink(launch.command, launch.processes)  # pyright: ignore[reportOptionalCall]
    except JaxparError as error:
        for problem in error.problems:
            say(f"not on fewer processes: {problem}")
        return launch
    say(f"one of {launch.processes} processes seems lost for good: on with {count}, {' '.join(arguments)}")
    return dataclasses.replace(launch, processes=count, command=[*launch.command, *arguments])


def _outcome(status: int, attempts: list[list[ProcessExit]]) -> dict[str, Any]:
    return {"status": status, "attempts": [[vars(record) for record in records] for records in attempts]}


def free_port() -> int:
    """Returns a port of this machine that no program listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]
