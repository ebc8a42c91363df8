"""A run that goes on with another schedule than it had says how its learning rate jumps; any other says nothing."""

import io
import re

import pytest
from pairwise import some

from jaxpar.job import run
from jaxpar.job.file.parse import loads

JOB = """
[parallel]
data = 8
[model]
name = "mlp"
hidden = 8
[data]
source = "digits"
[optimizer]
learning_rate = 0.01
[train]
loss = "classify"
steps = 4
global_batch = 8
"""


def train(folder, *overrides):
    """Returns what a run printed."""
    out = io.StringIO()
    run.train(loads(JOB, [f"run.dir={folder}", *overrides]), stream=out)
    return out.getvalue()


LINEAR = ["optimizer.decay=linear", "optimizer.final=0.0"]


@pytest.mark.nightly
def test_a_finished_run_that_gets_more_steps_says_both_rates(tmp_path):
    train(tmp_path, *LINEAR)
    said = train(tmp_path, *LINEAR, "train.steps=8")
    # linear: the rate of step i (from 1) of n is 0.01 (n - i + 1) / n
    assert f"jumps from {0.01 * 1 / 4:.3g} at step 4 to {0.01 * 4 / 8:.3g} at step 5" in said
    assert "schedule is now that of 8 steps" in said
    assert "jumps" not in train(tmp_path, *LINEAR, "train.steps=8")  # nothing is left to do


@pytest.mark.nightly
def test_a_changed_optimizer_says_it_too(tmp_path):
    train(tmp_path, "optimizer.decay=constant")
    named = 'run.changed=["optimizer.learning_rate"]'
    said = train(tmp_path, "optimizer.decay=constant", "train.steps=6", "optimizer.learning_rate=0.02", named)
    assert "jumps from 0.01 at step 4 to 0.02 at step 5" in said


@pytest.mark.nightly
def test_fewer_steps_with_leave_say_it_in_the_middle(tmp_path):
    train(tmp_path, *LINEAR, "train.steps=8", "checkpoint.every=4", "checkpoint.keep_last=9")
    job = loads(JOB, [f"run.dir={tmp_path}", *LINEAR, "train.steps=6", 'run.changed=["train.steps"]'])
    out = io.StringIO()
    run.train(job, at=4, stream=out)
    (found,) = re.findall(r"jumps from (\S+) at step 4 to (\S+) at step 5", out.getvalue())
    assert found == (f"{0.01 * 5 / 8:.3g}", f"{0.01 * 2 / 6:.3g}")


UNCHANGED = {
    "a constant rate": ["optimizer.decay=constant"],
    "a warm-up that is over": ["optimizer.decay=constant", "optimizer.warmup=2"],
}


@pytest.mark.nightly
@pytest.mark.parametrize("settings", some(UNCHANGED.values(), [UNCHANGED["a constant rate"]]), ids=UNCHANGED)
def test_a_rate_that_does_not_depend_on_the_steps_is_no_jump(settings, tmp_path):
    train(tmp_path, *settings)
    assert "jumps" not in train(tmp_path, *settings, "train.steps=8")


@pytest.mark.slow
def test_a_run_that_goes_on_as_it_was_says_nothing(tmp_path):
    every = ["checkpoint.every=2", "checkpoint.keep_last=9", *LINEAR]
    train(tmp_path, *every)
    out = io.StringIO()
    run.train(loads(JOB, [f"run.dir={tmp_path}", *every]), at=2, stream=out)
    assert "on from step 2" in out.getvalue()
    assert "jumps" not in out.getvalue()
