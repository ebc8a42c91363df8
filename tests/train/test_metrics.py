"""Evaluations are compared by any metric, a run that gets no better ends, and any object is told what is measured."""

import io
import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from logged_run import read_tensorboard

from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.train.metrics import Log
from jaxpar.train.run import Best

JOB = """
[run]
dir = "{to}/run"
[model]
name = "mlp"
inputs = 8
classes = 3
layers = 1
dim = 8
hidden = 8
[data]
source = "arrays"
path = "{to}/data.npz"
held_out = 0.25
[train]
steps = 12
global_batch = 8
loss = "classify"
eval_every = 2
{train}
[optimizer]
learning_rate = {rate}
decay = "constant"
[mesh]
devices = 1
[checkpoint]
{checkpoint}
[metrics]
{metrics}
"""


@pytest.fixture
def folder(tmp_path, monkeypatch):
    rng = np.random.default_rng(0)
    inputs = rng.normal(size=(64, 8)).astype(np.float32)
    np.savez(tmp_path / "data.npz", inputs=inputs, labels=np.argmax(inputs[:, :3], axis=1).astype(np.int32))
    monkeypatch.chdir(tmp_path)
    return tmp_path


def job(folder, *overrides, rate=0.0, train="", checkpoint="", metrics=""):
    text = JOB.format(to=folder, rate=rate, train=train, checkpoint=checkpoint, metrics=metrics)
    return loads(text, overrides)


def trained(folder, *overrides, **given):
    said = io.StringIO()
    return run.train(job(folder, *overrides, **given), stream=said), said.getvalue()


def rows(folder):
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.nightly
def test_a_run_that_gets_no_better_ends_saved_and_stays_ended(folder):
    done, said = trained(folder, train="patience = 2")
    assert (done["step"], done["stopped_by"]) == (6, None)  # the best is the first, of step 2
    assert "train.patience: 2 evaluations without a better eval_loss; the best is" in said
    assert "of step 2" in said
    again, said = trained(folder, train="patience = 2")
    assert (again["step"], again["resumed_from"]) == (6, 6)
    assert "train.patience: 2 evaluations" in said
    more, _ = trained(folder, train="patience = 4")
    assert more["step"] == 10
    assert [row["step"] for row in rows(folder) if "eval_loss" in row] == [2, 4, 6, 8, 10]


@pytest.mark.nightly
def test_the_best_are_kept_by_any_metric_and_direction(folder):
    best = 'every = 2\nkeep_last = 1\nkeep_best = 2\nbest = "eval_accuracy"\nbest_is = "highest"'
    done, _ = trained(folder, rate=0.05, checkpoint=best)
    assert done["step"] == 12
    found = {row["step"]: row["eval_accuracy"] for row in rows(folder) if "eval_accuracy" in row}
    assert max(found.values()) > min(found.values())
    kept = {int(path.name) for path in (folder / "run" / "checkpoints").iterdir() if path.name.isdigit()}
    assert kept >= set(sorted(sorted(found), key=lambda step: -found[step])[:2]) or len(set(found.values())) < 6
    assert 12 in kept
    assert sorted(found[step] for step in kept)[-2:] == sorted(found.values())[-2:]


@pytest.mark.slow
def test_any_object_is_told_every_row(folder):
    (folder / "noted_rows.py").write_text(
        "class Noted:\n    seen, closed = [], []\n    def log(self, step, values): self.seen.append((step, values))\n"
        "    def close(self): self.closed.append(True)\n"
        "class Broken:\n    def log(self, step, values): raise OSError('no such host')\n"
    )
    trained(folder, "train.steps=4", metrics='loggers = ["noted_rows:Noted"]')
    from noted_rows import Noted  # pyright: ignore[reportMissingImports]

    assert Noted.closed == [True]
    told = {}
    for step, values in Noted.seen:
        told.setdefault(step, {}).update(values)
    assert told == {row["step"]: {k: v for k, v in row.items() if k != "step"} for row in rows(folder)}
    assert {"eval_loss", "eval_accuracy"} <= told[4].keys()
    _, out = trained(folder, "train.steps=4", f"run.dir={folder}/other", metrics='loggers = ["noted_rows:Broken"]')
    assert "Broken.log(1, ...): no such host (noted_rows.py, line 6); training goes on" in out


@pytest.mark.slow
def test_a_job_names_tensorboard_and_its_curves_go_on_when_it_resumes(folder):
    loggers = 'loggers = ["tensorboard"]'
    trained(folder, "train.steps=4", metrics=loggers)
    trained(folder, "train.steps=6", metrics=loggers)
    curves, texts = read_tensorboard(folder / "run")
    for name in ("loss", "eval_loss"):
        assert curves[name] == [(row["step"], pytest.approx(row[name])) for row in rows(folder) if name in row]
    assert 'loss = "classify"' in texts["job"]
    assert "parameter  " in texts["layout"]
    assert "versions.jax = " in texts["config"]
    assert "report.html" in texts["config"]


def test_a_step_that_is_evaluated_again_has_waited_once(tmp_path):
    """Such as one whose loss is no number, which no checkpoint has for a score. Other processes write nothing."""
    for writes in (True, False):
        log = Log(tmp_path, start=0, writes=writes)
        for step, losses in ((1, [2.0]), (2, [float("nan")] * 2), (3, [3.0])):
            log.write({"step": step, "loss": 1.0})
            for loss in losses:
                log.amend({"eval_loss": loss}, step=step)
        assert Best(patience=2).evaluations_since_best(log.evaluated)[0] == 2
        assert [row["step"] for row in log.evaluated] == [1, 2, 3]
        log.close()


def test_a_logger_is_open_until_the_run_ends_whatever_is_rolled_back(tmp_path):
    class Once:
        seen, closed = [], 0

        def log(self, step, values):
            assert not self.closed
            self.seen.append(step)

        def close(self):
            self.closed += 1

    logger = Once()
    log = Log(tmp_path, start=0, loggers=[logger])
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.rewind(1)
    log.write({"step": 2, "loss": 1.0})
    log.close()
    assert (logger.seen, logger.closed) == ([1, 2, 3, 2], 1)


WRONG = {
    "no such metric": ({"checkpoint": 'best = "eval_acuracy"'}, "an evaluation has eval_accuracy, eval_loss"),
    "patience without evaluations": ({"train": "patience = 2"}, "early stopping needs regular evaluations"),
    "negative": ({"train": "patience = -1"}, "train.patience = -1"),
    "no direction": ({"checkpoint": 'best_is = "most"'}, "best_is"),
    "no logger": ({"metrics": 'loggers = ["nothing_here:Logger"]'}, "nothing_here"),
    "no log": ({"metrics": 'loggers = ["loggers_of_none:thing"]'}, "without a method `log`"),
    "no such name": ({"metrics": 'loggers = ["tensorbord"]'}, "did you mean 'tensorboard'?"),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_measures_that_there_are_not_are_refused_before_anything_runs(case, folder):
    (folder / "loggers_of_none.py").write_text("thing = 5\n")
    given, said = WRONG[case]
    overrides = ["train.eval_every=0"] if "without" in case else []

    def checked():
        if problems := check(job(folder, *overrides, **given)):
            raise JaxparError(*problems)

    with pytest.raises(JaxparError) as caught:
        checked()
    assert said in str(caught.value), str(caught.value)


@settings(max_examples=60, deadline=None)
@given(scores=st.lists(st.none() | st.integers(-3, 3), max_size=9), lowest=st.booleans(), patience=st.integers(0, 4))
def test_a_run_waits_as_it_would_by_looking_at_each_evaluation_in_turn(scores, lowest, patience):
    rows = [{"step": i, "eval_x": score} for i, score in enumerate(scores)]
    best, since = None, 0
    for score in scores:
        better = score is not None and (best is None or (score < best if lowest else score > best))
        best, since = (score, 0) if better else (best, since + 1)
    asked = Best(metric="eval_x", lowest=lowest, patience=patience)
    assert asked.evaluations_since_best(rows)[0] == since
    assert bool(asked.stop_reason(rows)) == (0 < patience <= since)
