"""A small run that is killed at any moment: what `train/test_kills.py` starts, again and again.

It trains through the real loop, with a checkpoint at every step, on two simulated devices; or by DiLoCo, on eight.
"""

import os
import signal
from pathlib import Path

import flax.nnx as nnx
import jax
import numpy as np
import optax

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints, Store, manifest, writing
from jaxpar.checkpoint import store as stores
from jaxpar.train import loop, metrics

# Where a process kills itself: a function that is called there, once per checkpoint.
POINTS = {
    "before there is a list": (manifest, "write"),
    "before the list is on the disk": (manifest, "sync"),
    "before it has its name": (Path, "rename"),
    "when it has just got its name": (writing, "sync"),
    "while an old one is deleted": (stores.shutil, "rmtree"),
}


class Net(nnx.Module):
    def __init__(self, rngs):
        self.a, self.b = nnx.Linear(16, 16, rngs=rngs), nnx.Linear(16, 4, rngs=rngs)
        self.dropout = nnx.Dropout(0.1, rngs=rngs)

    def __call__(self, x):
        return self.b(self.dropout(nnx.relu(self.a(x))))


class Numbers:
    """The same batch for the same step, whenever it is asked for."""

    fingerprint = "numbers"

    def batch(self, index, size):
        rng = np.random.default_rng(index)
        return {"inputs": rng.random((size, 16), np.float32), "labels": rng.integers(0, 4, size).astype(np.int32)}

    def evaluation(self, index, size):
        return []


class Told:
    """Sends every row to the test."""

    def __init__(self, send):
        self.step, self.say, self.show_activity = lambda row: send.send(row["step"]), print, lambda what: None


WHOLE = jp.Parallel(fsdp=2, zero=3)
NAMES = {"a/kernel": (None, "mlp"), "b/kernel": ("mlp", None)}
DILOCO = jp.Parallel(data=2, fsdp=2, tensor=2, exchange=jp.Exchange("diloco", every=4), paths=NAMES)


def train(folder, steps, send, point=None, after=0, parallel=WHOLE):
    """Trains from the newest checkpoint to the last step; kills itself at the `after`th pass of a point."""
    jax.config.update("jax_num_cpu_devices", parallel.data * parallel.fsdp * parallel.tensor)
    if point:
        _kill_at(*POINTS[point], after)
    folder = Path(folder)
    layout, optimizer = jp.compose(Net, parallel), optax.adam(1e-2)
    step, store = (
        jp.train_step(layout, jp.classification_loss, optimizer),
        Store(folder / "checkpoints", Checkpoints(every=1)),
    )
    if store.steps():
        start, at = store.restore(step.abstract())
    else:
        start, at = jp.init_state(layout, optimizer), 0
    send.send(at)
    folder.mkdir(exist_ok=True)
    log = metrics.Log(folder, start=at)
    loop.run(
        loop.Run(
            step=step, source=Numbers(), steps=steps, global_batch=8, checkpoints=store.spec, store=store, log=log,
            progress=Told(send),
        ),
        start,
    )  # fmt: skip
    log.close()


def _kill_at(where, name, after):
    function, left = getattr(where, name), [after]

    def killing(*args, **settings):
        if left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        left[0] -= 1
        return function(*args, **settings)

    setattr(where, name, killing)
