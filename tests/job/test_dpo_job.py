"""A job that learns preferences: trained, resumed, started from a run, exported, and refused."""

import io
import json
from pathlib import Path

import numpy as np
import pytest

from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import load
from jaxpar.job.parts.plan_model import planner_model
from jaxpar.job.run_weights import export_checkpoint
from jaxpar.models.huggingface.weights import load as load_pretrained

FILE = Path(__file__).parents[2] / "configs" / "dpo_fsdp4_tensor2.toml"
NO_EVALUATION = "train.eval_every=0", "data.held_out=0.0"
DATA = f"data.path={FILE.parent / 'preferences.jsonl'}"


def job(folder, *overrides):
    return load(
        FILE,
        [
            DATA,
            f"run.dir={folder}",
            "model.layers=1",
            "train.steps=3",
            "checkpoint.every=2",
            *NO_EVALUATION,
            *overrides,
        ],
    )


def trained(folder, *overrides):
    said = io.StringIO()
    run.train(job(folder, *overrides), stream=said)
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return [row["loss"] for row in rows], rows, said.getvalue()


@pytest.mark.slow
def test_a_run_starts_at_its_reference_and_is_exported_without_it(tmp_path):
    losses, rows, said = trained(tmp_path / "first")
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)
    assert losses[-1] < losses[0]
    assert rows[-1]["reward_margin"] > 0
    export_checkpoint(tmp_path / "first", None, tmp_path / "exported")
    assert not [path for path in load_pretrained(tmp_path / "exported").params if "reference" in path]

    losses, rows, said = trained(tmp_path / "next", f"checkpoint.start_from={tmp_path / 'first'}", "train.steps=1")
    assert "arrays taken from" in said
    assert losses[0] == pytest.approx(np.log(2), abs=1e-6)  # the reference is what was taken, too
    assert rows[0]["reward_margin"] == pytest.approx(0, abs=1e-6)


@pytest.mark.nightly
@pytest.mark.filterwarnings("ignore:.*each device computes")
@pytest.mark.parametrize("keys", ["train.freeze=['embed']", "train.adapters={rank=2,paths=['blocks/*']}"])
def test_a_resumed_run_has_the_losses_of_one_that_was_not_stopped(keys, tmp_path):
    want, *_ = trained(tmp_path / "whole", keys, "optimizer.decay=constant")
    trained(tmp_path / "stopped", keys, "optimizer.decay=constant", "train.steps=2")
    got, *_ = trained(tmp_path / "stopped", keys, "optimizer.decay=constant")
    assert got == want
    assert want[0] == pytest.approx(np.log(2), abs=1e-6)


WRONG = {
    "other data": (["data.preferences=false"], "without data.preferences"),
    "other loss": (["train.loss=next_token"], 'train.loss = "dpo"; or data.messages'),
    "settings of another loss": (["train.loss=classify", "data.preferences=false", "train.dpo.beta=1"], "[train.dpo]"),
    "range": (["train.dpo.label_smoothing=0.7"], "train.dpo.label_smoothing"),
    "a pipeline": (["parallel.fsdp=2", "parallel.pipe=2"], "pipe=2 with a reference"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_does_not_belong_together_is_refused(wrong, tmp_path):
    overrides, message = WRONG[wrong]
    try:
        problems = "\n".join(map(str, check(job(tmp_path / "run", *overrides))))
    except JaxparError as error:
        problems = str(error)
    assert message in problems


def test_the_planner_says_that_it_has_no_formulas_for_it(tmp_path):
    with pytest.raises(JaxparError, match="jaxpar inspect JOB"):
        planner_model(job(tmp_path / "run"), 8)
