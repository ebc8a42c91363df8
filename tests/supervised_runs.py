"""Runs under `jaxpar launch` that are tiny and slow enough to be ended from outside, and what is left of them."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

OWN = """\
import time

import jax.numpy as jnp
import numpy as np
from flax import nnx


def model(rngs):
    return nnx.Linear(4, 4, rngs=rngs)


def loss(model, batch):
    return jnp.mean(model(batch["x"]) ** 2)


class Batches:
    def batch(self, step, size):
        time.sleep({seconds})
        return {{"x": np.random.default_rng(step).normal(size=(size, 4)).astype(np.float32)}}
"""
JOB = """\
[model]
name = "own:model"
[train]
steps = {steps}
global_batch = 4
loss = "own:loss"
[parallel]
data = 2
[mesh]
simulate = 2
[data]
source = "own:Batches"
[optimizer]
warmup = 1
[checkpoint]
every = {every}
[metrics]
show_every = 1
[run]
dir = "run"
timeout = {timeout}
"""

OWN_CHILD = """\
for line in range(20_000):
    print("a line of a process that is long enough to fill the pipe, number", line, 30 * ".")
print("the last line", flush=True)
"""


def write(folder, *, steps=100_000, seconds=0.01, every=0, timeout=5):
    """Writes a job and its module into a folder."""
    (folder / "own.py").write_text(OWN.format(seconds=seconds))
    (folder / "job.toml").write_text(JOB.format(steps=steps, every=every, timeout=timeout))


def start(folder, *words, program=("-m", "jaxpar"), **how):
    """Starts `jaxpar` in a folder; its output is read by the test unless it says otherwise."""
    how = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | how
    return subprocess.Popen([sys.executable, *program, *words], cwd=folder, **how)


def started_by(folder):
    """Returns the living processes whose working directory is this folder."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                inside = Path(os.readlink(entry / "cwd")) == folder.resolve()
                ended = (entry / "stat").read_text().rpartition(")")[2].split()[0] == "Z"
            except OSError:  # it ended meanwhile, or is not ours
                continue
            if inside and not ended:
                found.append(int(entry.name))
    return found


def rows(folder):
    """Returns the steps that are written down."""
    file = folder / "run" / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(true, *, seconds):
    """Returns whether something came true in time."""
    until = time.monotonic() + seconds
    while not true():
        if time.monotonic() > until:
            return False
        time.sleep(0.05)
    return True
