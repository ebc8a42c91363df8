"""An update that spoils the parameters while its loss is fine: it is not saved, or what was saved is gone behind."""

import io

import flax.nnx as nnx
import hooks
import numpy as np
import optax
import pytest

from jaxpar.errors import JaxparError
from jaxpar.job import run as job_run
from jaxpar.job.file.parse import loads

JOB = """
[mesh]
devices = 2
[parallel]
data = 2
[model]
name = "test_poisoned_updates:Net"
[data]
source = "test_poisoned_updates:Scaled"
[optimizer]
name = "sgd"
learning_rate = 1e22
decay = "constant"
beta1 = 0.0
clip = 0.0
[train]
loss = "test_poisoned_updates:scaled"
steps = 12
global_batch = 4
[checkpoint]
every = 1
keep_last = 4
"""
USUAL, WRECKS, OVERFLOWS = 1e-23, 3e7, 1e18  # of a loss; times the rate: parameters of 0.1, 1e29 (and nan next), inf


class Net(nnx.Module):
    def __init__(self, rngs):
        self.embed = nnx.Embed(32, 8, rngs=rngs)
        self.head = nnx.Linear(8, 32, use_bias=False, rngs=rngs)

    def __call__(self, tokens):
        return self.head(self.embed(tokens))


def scaled(model, batch):
    losses = optax.softmax_cross_entropy_with_integer_labels(model(batch["inputs"]), batch["targets"])
    return (losses * batch["scale"][:, None]).sum(), losses.size


class Scaled:
    """Tokens that repeat, and how much their loss counts."""

    fingerprint = "scaled"
    scales: dict = {}

    def batch(self, step, size):
        made = hooks.made(step, size)
        scale = np.full(size, Scaled.scales.get(step, USUAL), np.float32)
        return {"inputs": made["inputs"], "targets": made["targets"], "scale": scale}


def run(folder, *overrides, scales=None, at=None):
    Scaled.scales = scales or {}
    said = io.StringIO()
    settings = {} if at is None else {"at": at}
    outcome = job_run.train(loads(JOB, [f"run.dir={folder}", *overrides]), stream=said, **settings)
    return outcome, said.getvalue()


def losses(folder):
    return [row["loss"] for row in hooks.rows(folder)]


@pytest.mark.nightly
def test_parameters_that_are_none_are_not_saved(tmp_path):
    with pytest.raises(JaxparError, match="the parameters of step 7 are not finite"):
        run(tmp_path, scales={6: OVERFLOWS})
    assert hooks.saved(tmp_path) == [3, 4, 5, 6]
    outcome, _ = run(tmp_path)  # without the poison
    assert (outcome["step"], outcome["resumed_from"]) == (12, 6)


def test_a_rollback_passes_over_what_spoils_the_parameters(tmp_path):
    outcome, said = run(tmp_path, "faults.on_bad_step=rollback", scales={6: OVERFLOWS})
    assert outcome["step"] == 12
    assert "the parameters of step 7 are not finite" in said
    assert "back to step 6" in said


@pytest.mark.slow
def test_a_step_that_spoils_the_parameters_is_skipped(tmp_path):
    outcome, _ = run(tmp_path, "faults.on_bad_step=skip", scales={6: OVERFLOWS})
    assert outcome["step"] == 12
    assert [row["step"] for row in hooks.rows(tmp_path) if row.get("skipped")] == [7]


def test_nothing_is_saved_while_steps_are_skipped(tmp_path):
    with pytest.raises(JaxparError, match="the last of 5 in a row"):
        run(tmp_path, "faults.on_bad_step=skip", "faults.skips=4", scales={6: WRECKS})
    assert hooks.saved(tmp_path) == [4, 5, 6, 7]  # the seventh is spoilt, and those before are still there


def test_a_checkpoint_that_is_due_in_a_run_of_skips_comes_after_it(tmp_path):
    scales = dict.fromkeys((3, 4), OVERFLOWS)  # steps 4 and 5 are skipped
    run(tmp_path, "faults.on_bad_step=skip", "checkpoint.every=4", "train.steps=10", scales=scales)
    assert hooks.saved(tmp_path) == [6, 8, 10]


def test_a_rollback_goes_further_back_where_the_newest_fails_at_once(tmp_path):
    outcome, said = run(tmp_path, "faults.on_bad_step=rollback", scales={6: WRECKS})
    assert outcome["step"] == 12
    assert np.isfinite(losses(tmp_path)).all()
    assert "back to step 7" in said
    assert "back to step 6" in said
    assert (tmp_path / "checkpoints" / "000007.left").is_dir()


@pytest.mark.slow
def test_a_run_goes_on_from_the_step_that_is_named(tmp_path):
    with pytest.raises(JaxparError, match="the loss of step 8 is nan"):
        run(tmp_path, scales={6: WRECKS})
    with pytest.raises(JaxparError, match="the loss of step 8 is nan") as caught:
        run(tmp_path)
    assert "--from 6" in caught.value.problems[0].fix
    with pytest.raises(JaxparError, match="no checkpoint of step 1"):
        run(tmp_path, at=1)
    outcome, said = run(tmp_path, at=6)
    assert (outcome["resumed_from"], outcome["step"]) == (6, 12)
    assert "000007.left" in said
    assert [row["step"] for row in hooks.rows(tmp_path)] == list(range(1, 13))
    assert np.isfinite(losses(tmp_path)).all()
