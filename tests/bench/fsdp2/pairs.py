"""Starts both sides, gives them turns in random order, and compares what a step costs in seconds of processors.

Seconds of processors, of both processes of a side together: other load of the machine slows a step, and hardly makes
it cost more. What a process does while it waits for the other one counts too.
"""

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse
from jaxpar.measure.record import commit, versions
from jaxpar.supervisor import free_port

from ..command import environment

BOUND = 0.85  # seconds of processors per step, jaxpar's / PyTorch's
SIDES, WAYS, PROCESSES = ("jaxpar", "torch"), ("none", "full"), 2
Spent = Mapping[str, Sequence[float]]  # "torch, full": seconds of processors per step, in each round


def settings() -> dict[str, Any]:
    """Returns what both sides are given."""
    return tomllib.loads((Path(__file__).parent / "settings.toml").read_text(encoding="utf-8"))


def fsdp2(*, rounds: int, torch: str = sys.executable) -> dict[str, Any]:
    """Measures, prints a table, and returns it with whether the bound holds.

    Args:
      rounds: Turns of each side and way, in random order within a round.
      torch: A Python that has torch.

    Raises:
      JaxparError: If a process ends or does not answer.
    """
    given, order, load = settings(), random.Random(0), os.getloadavg()[0]
    spent: dict[str, list[float]] = {f"{side}, {way}": [] for side, way in product(SIDES, WAYS)}
    losses: dict[str, float] = {}
    with _started("jaxpar", sys.executable, given) as ours, _started("torch", torch, given) as theirs:
        sides = {"jaxpar": ours, "torch": theirs}
        runs = {side: each.answers()[0]["version"] for side, each in sides.items()}
        for name in spent:
            side, way = name.split(", ")
            losses[name] = sides[side].turn(way, given["run"]["warm"])[1]
        for _ in range(rounds):
            for name in order.sample(sorted(spent), len(spent)):
                side, way = name.split(", ")
                spent[name].append(sides[side].turn(way, given["run"]["steps"])[0])
    found = compare(spent)
    print(
        f"{PROCESSES} processes a side, {rounds} rounds of {given['run']['steps']} steps, load {load:.1f} at the start"
    )
    for name, each in spent.items():
        print(f"  {name:<14}{statistics.median(each):>8.3f} s of processors a step")
    verdict = "holds" if found["holds"] else "DOES NOT HOLD"
    print(f"{' / '.join(found['best'])}: {found['ratio']:.3f}, median of {rounds} pairs; bound {BOUND} {verdict}")
    return found | {
        "seconds": spent, "losses": losses, "load": load, "settings": given, "rounds": rounds, "bound": BOUND,
        "where": {"versions": {**versions(), **runs}, "commit": commit(), "cores": os.cpu_count()},
    }  # fmt: skip


def compare(spent: Spent) -> dict[str, Any]:
    """Returns the better way of each side, the median ratio of rounds between these, and whether the bound holds."""
    best = [min((f"{side}, {way}" for way in WAYS), key=lambda name: statistics.median(spent[name])) for side in SIDES]
    ratios = [ours / theirs for ours, theirs in zip(*(spent[name] for name in best), strict=True)]
    ratio = statistics.median(ratios)
    return {"best": best, "ratio": ratio, "ratios": ratios, "holds": ratio <= BOUND}


@dataclass(frozen=True)
class _Side:
    """The processes of one side, each waiting for its turn."""

    name: str
    children: Sequence[subprocess.Popen[str]]
    limit: float
    log: Path

    def turn(self, way: str, count: int) -> tuple[float, float]:
        """Returns the seconds of processors per step, of all processes, and the loss of the last step."""
        for child in self.children:
            assert child.stdin is not None
            print(way, count, file=child.stdin, flush=True)
        spent = self.answers()
        return sum(each["cpu"] for each in spent) / count, spent[0]["loss"]

    def answers(self) -> list[dict[str, Any]]:
        """Returns the next line of each process; all are killed if one stays away too long.

        Raises:
          JaxparError: If a process ends.
        """
        late = threading.Timer(self.limit, lambda: [child.kill() for child in self.children])
        late.start()
        try:
            lines = [child.stdout.readline() for child in self.children if child.stdout]
        finally:
            late.cancel()
        if not all(lines):
            said = self.log.read_text(errors="replace").strip()[-800:]
            raise refuse(
                f"a process of {self.name} ended, or was silent for {self.limit:g} s: {said}",
                rule="both sides run on this machine",
                fix="--torch PYTHON, one that has torch 2.6 or newer, numpy and a C++ compiler",
            )
        return [json.loads(line) for line in lines]


@contextmanager
def _started(name: str, python: str, given: dict[str, Any]) -> Iterator[_Side]:
    """Starts the processes of a side, each on a core of its own, and kills them in the end."""
    port, cores = str(free_port()), sorted(os.sched_getaffinity(0))
    children: list[subprocess.Popen[str]] = []
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        try:
            with log.open("w") as errors:
                for rank in map(str, range(PROCESSES)):
                    own = {
                        "JAXPAR_COORDINATOR": f"127.0.0.1:{port}", "JAXPAR_PROCESSES": str(PROCESSES),
                        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(PROCESSES),
                        "JAXPAR_PROCESS": rank, "RANK": rank,
                    }  # fmt: skip
                    child = subprocess.Popen(
                        [python, "-m", f"bench.fsdp2.{name}_side", json.dumps(given)],
                        env={**environment(), **given["environment"], **own}, text=True,
                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
                    )  # fmt: skip
                    children.append(child)
                    os.sched_setaffinity(child.pid, {cores[int(rank) % len(cores)]})
            yield _Side(name, children, given["run"]["limit"], log)
        finally:
            for child in children:
                child.kill()
                child.wait()
