"""A device without memory: XLA's error is answered with what needs it, what frees most, and what is saved."""

import os
import subprocess
import sys

import jax
import numpy as np
import optax
import pytest
from tiny import Staged, batches, token_loss

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints
from jaxpar.inspector import report
from jaxpar.step.checks.out_of_memory import possible_changes
from jaxpar.step.memory_error import OutOfMemoryError, is_out_of_memory
from jaxpar.step.numerics import Numerics
from jaxpar.units import show_bytes

GPU = "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1536000000 bytes."
TABLE = """RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1.43GiB.
BufferAssignment OOM Debugging.
BufferAssignment stats:
             parameter allocation:  512.00MiB
Peak buffers:
	Buffer 1:
		Size: 1.43GiB
"""
ADAM = optax.adam(1e-3)
STATE = "parameters", "optimizer state"


class Full:
    """A compiled program that the device has no memory for, from its second call on."""

    def __init__(self, program, message, calls=0):
        self.program, self.message, self.calls = program, message, calls

    def __call__(self, *arguments):
        self.calls -= 1
        if self.calls < 0:
            raise jax.errors.JaxRuntimeError(self.message)
        return self.program(*arguments)

    def memory_analysis(self):
        return self.program.memory_analysis()


def step_and_state(parallel=None, devices=None, **numerics):
    layout = jp.compose(lambda rngs: Staged(rngs, layers=2), parallel or jp.Parallel(data=2, fsdp=4), devices)
    step = jp.train_step(layout, token_loss, ADAM, **numerics)
    return step, jp.init_state(layout, ADAM)


def fill(step, message=GPU, calls=0):
    """Makes all compiled programs of a step run out of memory."""
    step.programs |= {key: Full(program, message, calls) for key, program in step.programs.items()}


@pytest.mark.nightly
@pytest.mark.parametrize("message", [GPU, TABLE])
def test_a_step_says_what_needs_memory_and_what_would_free_most(message):
    step, state = step_and_state(jp.Parallel(data=2, fsdp=4, zero=2))
    batch = next(batches(1))
    state, _ = step(state, batch)
    report = jp.inspect(step, batch)
    fill(step, message)
    with pytest.raises(OutOfMemoryError) as caught:
        step(state, batch)
    text = str(caught.value)
    assert "1.43" in text.partition("could not allocate")[2]
    assert str(caught.value.__cause__) == message
    for share in report.memory:  # by cause, as the report has it
        assert f"{share.cause} {show_bytes(share.bytes)}" in text
    assert 'remat="full"' in text
    assert text.count("frees about") == 3


def test_an_evaluation_says_what_it_needs_and_other_errors_pass():
    step, state = step_and_state()
    batch = next(batches(1))
    step.evaluate(state, batch)
    fill(step, "RESOURCE_EXHAUSTED: Out of memory allocating 2048 bytes.")
    with pytest.raises(OutOfMemoryError, match=r"an evaluation needs .* could not allocate 2 KiB"):
        step.evaluate(state, batch)
    fill(step, "INTERNAL: a link is down")
    with pytest.raises(jax.errors.JaxRuntimeError, match="a link is down"):
        step.evaluate(state, batch)


HUGE = """
import jax, jax.numpy as jnp, numpy as np, optax
from flax import nnx
import jaxpar as jp

class Huge(nnx.Module):
    def __init__(self, rngs):
        self.w = nnx.Param(jnp.zeros((2**25, 2**25)))  # 4 PiB, more than an address space

    def __call__(self, x):
        return x @ self.w[...]

layout = jp.compose(Huge, jp.Parallel(), jax.devices()[:1])
step = jp.train_step(layout, lambda model, batch: (jnp.sum(model(batch["x"])), 1.0), optax.adam(1e-3))
try:
    jp.fit(step, {"x": np.ones((8, 1), np.float32)}, steps=1, batch=8)
except jp.JaxparError as error:
    print(type(error).__name__, type(error.__cause__).__name__, error)
"""


@pytest.mark.slow
def test_a_state_that_no_device_holds_is_refused_by_xla_and_explained():
    environment = os.environ | {"JAX_PLATFORMS": "cpu"}
    done = subprocess.run([sys.executable, "-c", HUGE], capture_output=True, text=True, check=True, env=environment)
    assert "OutOfMemoryError JaxRuntimeError" in done.stdout
    assert "optimizer state 8192 TiB, parameters 4096 TiB" in done.stdout
    assert "more devices (fsdp, tensor)" in done.stdout


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize("late", [False, True])
def test_a_run_names_its_newest_checkpoint_and_goes_on_from_there(tmp_path, monkeypatch, late):
    step, _ = step_and_state()
    batch = next(batches(1))
    checkpoints = Checkpoints(every=2)
    settings = {"run": tmp_path / "run", "batch": 16, "checkpoints": checkpoints, "show_every": 100}
    data = {name: np.concatenate([value] * 4) for name, value in batch.items()}
    jp.fit(step, data, steps=1, batch=16)  # compiles
    fill(step, calls=3)
    if late:  # XLA's error comes with the results of a step that was sent to the device before

        def fails(values):
            raise jax.errors.JaxRuntimeError(GPU)

        calls = []
        get = jax.device_get
        monkeypatch.setattr(jax, "device_get", lambda x: fails(x) if len(calls) > 2 else (calls.append(x), get(x))[1])
    with pytest.raises(OutOfMemoryError) as caught:
        jp.fit(step, data, steps=6, **settings)
    monkeypatch.undo()
    assert "step 2 is saved" in str(caught.value) or "step 3 is saved" in str(caught.value)
    step.programs.clear()
    outcome = jp.fit(step, data, steps=6, **settings)
    assert int(outcome.state.step) == 6


@pytest.mark.nightly
def test_a_run_without_a_saved_step_says_so(tmp_path):
    step, _ = step_and_state()
    batch = next(batches(1))
    jp.fit(step, batch, steps=1, batch=16)
    fill(step)
    with pytest.raises(OutOfMemoryError, match="no step of this run is saved yet"):
        jp.fit(step, batch, steps=2, batch=16, run=tmp_path / "run")


@pytest.mark.slow
def test_where_the_report_does_not_compile_the_state_is_arithmetic(monkeypatch):
    step, state = step_and_state()
    batch = next(batches(1))
    state, _ = step(state, batch)
    fill(step)

    def full(*_):
        raise jax.errors.JaxRuntimeError(GPU)

    monkeypatch.setattr(report, "inspect", full)
    with pytest.raises(OutOfMemoryError, match="temporary memory") as caught:
        step(state, batch)
    params = sum(leaf.addressable_shards[0].data.nbytes for leaf in jax.tree.leaves(state.params))
    assert f"parameters {show_bytes(params)}" in str(caught.value)


CAUSES = {"parameters": 80, "optimizer state": 160, "gradients": 80, "activations": 1000, "logits": 200,
          "gathered weights": 40}  # fmt: skip


@pytest.mark.parametrize(
    ("parallel", "numerics", "rows", "want"),
    [
        ({"data": 8}, {}, 2, {"fsdp=8": 280, "remat": 1000, "accumulate=2": 600, "precision": 600}),
        ({"fsdp": 8, "zero": 1}, {"precision": "bf16"}, 1, {"zero=3": 110, "remat": 1000}),
        ({"fsdp": 8, "zero": 2}, {"remat": "full", "precision": "bf16"}, 4, {"zero=3": 40, "accumulate=2": 600}),
        ({"fsdp": 8}, {"accumulate": 2, "precision": "bf16"}, 2, {"remat": 1000, "half of": 600}),
        ({"fsdp": 8}, {}, 0, {}),
    ],
)
def test_only_changes_that_a_step_has_not_made_are_proposed(parallel, numerics, rows, want):
    layout = jp.compose(lambda rngs: Staged(rngs, layers=2), jp.Parallel(**parallel))
    found = possible_changes(layout, Numerics(**numerics), CAUSES, rows=rows)
    assert len(found) == len(want)
    for (change, freed), (begin, expected) in zip(sorted(found), sorted(want.items()), strict=True):
        assert change.startswith(begin)
        assert freed == expected


def test_only_xlas_error_about_memory_is_one():
    assert is_out_of_memory(jax.errors.JaxRuntimeError(GPU))
    assert not is_out_of_memory(jax.errors.JaxRuntimeError("INTERNAL: RESOURCE"))
    assert not is_out_of_memory(RuntimeError(GPU))  # of a model, say
