"""The processes of a small run, of which one may be told to do otherwise."""

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from jaxpar.errors import refuse
from jaxpar.supervisor import free_port

PROCESSES, STEPS = 3, 100_000
LATEST = 180.0  # seconds in which processes must begin to train
JOB = """\
[model]
name = "own:model"
[train]
steps = {steps}
global_batch = 6
loss = "own:loss"
[parallel]
data = -1
[mesh]
simulate = {devices}
[data]
source = "own:Batches"
[optimizer]
warmup = 1
[run]
dir = "run"
timeout = {timeout}
"""
OWN = '''\
"""A model and its data; one process may be told by its environment to do otherwise."""

import os
import time

import jax.numpy as jnp
import numpy as np
from flax import nnx

PLANT = os.environ.get("PLANT", "")


def model(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


def loss(model, batch):
    out = model(batch["x"])
    return jnp.mean(out**2) * jnp.mean(batch["weight"]) * (2.0 if PLANT == "program" else 1.0)


class Batches:
    def batch(self, step, size):
        if PLANT == "late" and step == 30:
            time.sleep(1e6)
        x = np.random.default_rng(step).normal(size=(size, 4)).astype(np.float32)
        if PLANT == "corrupt" and step == 30:
            x[:] = np.nan
        weight = np.ones(size, np.float32)
        if PLANT == "nan" and step == 30:
            weight[:] = 3e38  # a number, whose product with the loss is none
            x *= 100
        return {"x": x, "weight": weight}
'''


@dataclass
class Processes:
    """The processes of one run.

    Attributes:
      folder: Where they run.
      children: Them, by number.
    """

    folder: Path
    children: dict[int, subprocess.Popen] = field(default_factory=dict)

    def step(self) -> int:
        """Returns the last step in the metrics."""
        file = self.folder / "run" / "metrics.jsonl"
        return len(file.read_text().splitlines()) if file.exists() else 0

    def met(self) -> int:
        """Returns how many processes watch each other."""
        return len(list((self.folder / "run" / "processes").rglob("[0-9].json")))

    def pid(self, process: int) -> int:
        """Returns the process id that a process gives."""
        (file,) = (self.folder / "run" / "processes").rglob(f"{process}.json")
        return int(json.loads(file.read_text())["pid"])

    def output(self, process: int) -> str:
        """Returns the output of a process so far."""
        return (self.folder / f"{process}.log").read_text(errors="replace")

    def wait_for_training(self, steps: int = 20) -> None:
        """Waits until the run has made some steps."""
        begin = time.monotonic()
        while self.step() < steps:
            ended = [process for process, child in self.children.items() if child.poll() is not None]
            if ended or time.monotonic() - begin > LATEST:
                said = self.output(ended[0] if ended else 0)[-800:]
                raise refuse(
                    f"process {ended or 'none'} ended before step {steps}: {said}",
                    rule="the processes train without an error until the fault is planted",
                    fix="jaxpar doctor",
                )
            time.sleep(0.02)

    def wait_for_end(self, *, but: int | None = None, within: float) -> dict[int, tuple[int, float]]:
        """Returns status and seconds of each process but the one at fault; those that go on are left out."""
        begin, ended = time.monotonic(), {}
        wanted = [process for process in self.children if process != but]
        while len(ended) < len(wanted) and time.monotonic() - begin < within:
            for process in wanted:
                if process not in ended and (status := self.children[process].poll()) is not None:
                    ended[process] = (status, time.monotonic() - begin)
            time.sleep(0.01)
        return ended


@contextmanager
def started(
    timeout: float,
    *,
    count: int = PROCESSES,
    plants: dict[int, str] | None = None,
    words: dict[int, list[str]] | None = None,
    launched: bool = False,
    run_in: Path | None = None,
) -> Iterator[Processes]:
    """Starts the processes of a small run and kills them in the end.

    Args:
      timeout: Seconds, `run.timeout`.
      count: Processes, with two devices each.
      plants: Process to the fault that it plants in itself.
      words: Process to overrides of its job.
      launched: Start them by one `jaxpar launch`, which is then the only child, as number 0.
      run_in: Where the run folder is; beside the job by default.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        if run_in is not None:
            (folder / "run").symlink_to(run_in)
        (folder / "own.py").write_text(OWN)
        (folder / "job.toml").write_text(JOB.format(steps=STEPS, devices=2 * count, timeout=timeout))
        run = Processes(folder)
        port = free_port()
        launch = ["launch", "-n", str(count), "--restarts", "0"] if launched else []
        try:
            for process in range(1 if launched else count):
                own = {
                    "JAXPAR_COORDINATOR": f"127.0.0.1:{port}", "JAXPAR_PROCESSES": str(count),
                    "JAXPAR_PROCESS": str(process), "PLANT": (plants or {}).get(process, ""),
                }  # fmt: skip
                with (folder / f"{process}.log").open("w") as log:
                    run.children[process] = subprocess.Popen(
                        [sys.executable, "-m", "jaxpar", *launch, "train", "job.toml", *(words or {}).get(process, [])],
                        cwd=folder, env={**os.environ, **own}, stdout=log, stderr=log,
                    )  # fmt: skip
            yield run
        finally:
            for child in run.children.values():
                if child.poll() is None:
                    child.send_signal(signal.SIGTERM if launched else signal.SIGKILL)
                child.wait(timeout=60)
