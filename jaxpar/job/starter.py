"""Writes a starter folder: a job, and the model, loss, data and test that it names, for the user to change."""

import re
from pathlib import Path

from jaxpar.errors import refuse
from jaxpar.files import write_text

JOB = """\
# A small regression. `jaxpar train` trains it, `jaxpar check job.toml` says what is wrong, `jaxpar plan job.toml` more.
# Every key, its default and its meaning: jaxpar train --print-defaults

[model]
name = "model:Net"               # the class in model.py; the other keys are what it takes
hidden = 32

[data]
source = "data:Waves"            # the class in data.py

[train]
loss = "loss:squares"            # the function in loss.py
steps = 200
global_batch = 64
eval_every = 50

[optimizer]
learning_rate = 0.01

[mesh]
simulate = 2                     # two simulated devices on the processor; leave it out on real ones

[parallel]
data = -1                        # all devices, each with a part of the batch
"""
MODEL = '''\
"""The model."""

import jax
from flax import nnx


class Net(nnx.Module):
    """Two matrices with a nonlinearity between them."""

    def __init__(self, hidden: int, *, rngs: nnx.Rngs):
        self.up = nnx.Linear(1, hidden, rngs=rngs)
        self.down = nnx.Linear(hidden, 1, rngs=rngs)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Returns [batch, 1] for [batch, 1]."""
        return self.down(nnx.tanh(self.up(x)))
'''
LOSS = '''\
"""The loss: sums and counts, divided once over all devices and microbatches."""

import jax.numpy as jnp


def squares(model, batch):
    """Returns the squared error, which is minimized, and the share of examples that are within 0.1."""
    error = model(batch["inputs"]) - batch["targets"]
    count = jnp.float32(error.size)
    near = jnp.sum(jnp.abs(error) < 0.1).astype(jnp.float32)
    return {"loss": (jnp.sum(jnp.square(error)), count), "near": (near, count)}
'''
DATA = '''\
"""The data: batches by the number of their step, so that a run that is resumed goes on with the right one."""

import numpy as np


class Waves:
    """Points of a sine."""

    def batch(self, step: int, size: int) -> dict[str, np.ndarray]:
        """Returns the batch of a step."""
        return self._points(np.random.default_rng([0, step]), size)

    def evaluation(self, index: int, size: int) -> dict[str, np.ndarray] | None:
        """Returns the index-th batch of held-out examples; None after the last."""
        return self._points(np.random.default_rng([1, index]), size) if index < 2 else None

    def _points(self, rng: np.random.Generator, size: int) -> dict[str, np.ndarray]:
        inputs = rng.uniform(-2, 2, (size, 1)).astype(np.float32)
        return {"inputs": inputs, "targets": np.sin(2 * inputs)}
'''
TEST = '''\
"""Two devices train as one does, and the loss falls."""

import jax
import numpy as np
import optax

import jaxpar as jp

jp.simulate(2)

from data import Waves  # noqa: E402
from loss import squares  # noqa: E402
from model import Net  # noqa: E402


def losses(devices):
    layout = jp.compose(lambda rngs: Net(8, rngs=rngs), jp.Parallel(data=len(devices)), devices)
    optimizer = optax.adam(0.01)
    state, step = jp.init_state(layout, optimizer), jp.train_step(layout, squares, optimizer)
    found = []
    for number in range(20):
        state, metrics = step(state, Waves().batch(number, 32))
        found.append(float(metrics["loss"]))
    return found


def test_two_devices_train_as_one():
    one, two = losses(jax.devices()[:1]), losses(jax.devices())
    np.testing.assert_allclose(one, two, rtol=1e-4)
    assert two[-1] < two[0]
'''


def new(name: str) -> list[Path]:
    """Writes the folder `name` and returns its files.

    Raises:
      JaxparError: If the name is invalid, or the folder exists and is not empty.
    """
    if not re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII):
        raise refuse(
            f"jaxpar new {name!r:.60}", rule="a name begins with a letter; then letters, digits, _", fix="mine"
        )
    folder = Path(name)
    rule, fix = "a new folder is empty", "another name"
    try:
        folder.mkdir(exist_ok=True)
        if any(folder.iterdir()):
            raise refuse(f"{folder} is not empty", rule=rule, fix=fix)
    except OSError as error:
        raise refuse(f"{folder}: {error.strerror}", rule=rule, fix=fix) from error
    files = {"job.toml": JOB, "model.py": MODEL, "loss.py": LOSS, "data.py": DATA, f"test_{name.lower()}.py": TEST}
    for file, text in files.items():
        write_text(folder / file, text)
    return [folder / file for file in files]
