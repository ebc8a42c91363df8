"""A run in this process whose data source does something at each batch: sends a signal, breaks, looks at the folder."""

import io
import json
import os
import signal
from contextlib import contextmanager

import numpy as np

from jaxpar.job import run as job_run
from jaxpar.job.file.parse import loads

JOB = """
[mesh]
devices = 2
[parallel]
data = 2
[model]
layers = 1
dim = 16
heads = 2
vocab = 32
[data]
source = "hooks:Hooked"
[optimizer]
learning_rate = 0.02
decay = "constant"
[train]
steps = 8
global_batch = 4
"""


def nothing(index):
    """Does nothing."""


class Hooked:
    """Tokens that repeat; `on_batch` and `on_evaluation` are called with the index of each batch before it is made."""

    fingerprint = "hooked"
    on_batch = on_evaluation = staticmethod(nothing)
    held_out = 3

    def batch(self, step, size):
        Hooked.on_batch(step)
        return made(step, size)

    def evaluation(self, index, size):
        if index >= Hooked.held_out:
            return None
        Hooked.on_evaluation(index)
        return made(1000 + index, size)


def made(step, size):
    rng = np.random.default_rng(step)
    tokens = (rng.integers(0, 32, (size, 1)) + np.arange(9)).astype(np.int32) % 32
    return {"inputs": tokens[:, :-1], "targets": tokens[:, 1:], "mask": np.ones((size, 8), np.float32)}


def held():
    """Yields other held-out batches."""
    return (made(5000 + index, 4) for index in range(2))


def run(folder, *overrides, batch=nothing, evaluation=nothing):
    """Trains in a folder; returns how it ended and what it said."""
    Hooked.on_batch, Hooked.on_evaluation = staticmethod(batch), staticmethod(evaluation)
    said = io.StringIO()
    try:
        outcome = job_run.train(loads(JOB, [f"run.dir={folder}", *overrides]), stream=said)
    finally:
        Hooked.on_batch = Hooked.on_evaluation = staticmethod(nothing)
    return outcome, said.getvalue()


def rows(folder):
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def saved(folder):
    """Returns the steps of the checkpoints that are whole."""
    return sorted(int(path.name) for path in (folder / "checkpoints").iterdir() if path.name.isdecimal())


def signalling(number, at):
    """Returns a hook that sends a signal to this process, once."""
    left = [at]

    def hook(index):
        if left and index == left[0]:
            left.clear()
            os.kill(os.getpid(), number)

    return hook


@contextmanager
def unharmed(number):
    """Yields a list of the signals that met no handler of a run: they would have ended the process."""
    met = []
    before = signal.signal(number, lambda number, frame: met.append(number))
    try:
        yield met
    finally:
        signal.signal(number, before)
