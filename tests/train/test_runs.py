"""Whole runs, most as processes: what is written, and that no stop, kind or unkind, changes a loss."""

import io
import itertools
import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from pairwise import some

from jaxpar.cli.main import main
from jaxpar.job.file.parse import load
from jaxpar.job.run import train

pytestmark = pytest.mark.xdist_group("runs")  # one worker, one undisturbed run to compare with

JOB = """
[mesh]
simulate = 4
[parallel]
data = 2
fsdp = 2
[model]
layers = 1
dim = 32
heads = 2
dropout = 0.1
[data]
source = "text"
path = "{text}"
seq = 16
[train]
steps = {steps}
global_batch = 8
eval_every = 10
eval_batches = 2
[checkpoint]
every = 5
keep_best = 1
[metrics]
show_every = 5
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("runs")


def write_job(folder, name="job.toml", steps=40):
    text = folder / "corpus.txt"
    text.write_text("".join(f"{i} squared is {i * i}.\n" for i in range(2000)))
    job = folder / name
    job.write_text(JOB.format(text=text, steps=steps))
    return job


def command(*words):
    return [sys.executable, "-m", "jaxpar", *map(str, words)]


def run(*words, check=True, **settings):
    done = subprocess.run(command(*words), capture_output=True, text=True, timeout=300, check=False, **settings)
    assert not check or done.returncode == 0, done.stdout + done.stderr
    return done


def start(*words):
    return subprocess.Popen(command(*words), stdout=subprocess.PIPE, text=True)


def wait_for(process, beginning):
    """Reads what a process prints up to a line that begins so."""
    assert any(line.startswith(beginning) for line in process.stdout)


def rows(run_dir):
    return [json.loads(line) for line in (Path(run_dir) / "metrics.jsonl").read_text().splitlines()]


def losses(run_dir):
    return {row["step"]: (row["loss"], row["grad_norm"], row.get("eval_loss")) for row in rows(run_dir)}


@pytest.fixture(scope="module")
def whole(folder):
    """A run nobody disturbed, and its losses."""
    job = write_job(folder)
    run("train", job, f"run.dir={folder}/whole", "--json", folder / "whole.json")
    return folder / "whole"


@pytest.mark.nightly
def test_a_run_writes_what_it_did(whole, folder):
    made = rows(whole)
    assert [row["step"] for row in made] == list(range(1, 41))
    keys = {"step", "loss", "tokens", "seconds", "tokens_per_second", "grad_norm", "learning_rate"}
    assert all(keys <= row.keys() for row in made)
    assert [row["step"] for row in made if "eval_loss" in row] == [10, 20, 30, 40]
    assert made[-1]["loss"] < made[0]["loss"] - 1
    assert all(row["tokens"] == 8 * 16 for row in made)
    record = json.loads((whole / "run.json").read_text())
    assert {"jax", "flax", "optax", "jaxpar", "python"} <= record["versions"].keys()
    assert record["data"]
    assert record["devices"] == "4 x cpu (simulated)"
    assert json.loads((folder / "whole.json").read_text())["step"] == 40


@pytest.mark.nightly
def test_the_resolved_job_is_the_same_job(whole, capsys):
    resolved = load(whole / "job.toml")
    assert (resolved.train.steps, resolved.model["dim"], resolved.parallel.fsdp) == (40, 32, 2)
    assert main(["check", str(whole / "job.toml")]) == 0
    assert capsys.readouterr().out.startswith("ok")


def test_latest_and_best_checkpoints_are_kept(whole):
    evaluated = {row["step"]: row["eval_loss"] for row in rows(whole) if "eval_loss" in row}
    kept = {int(path.name) for path in (whole / "checkpoints").iterdir()}
    assert kept == {35, 40} | {min(evaluated, key=lambda step: evaluated[step])}


@pytest.mark.nightly
def test_a_finished_run_has_nothing_to_do(whole, folder):
    before = losses(whole)
    assert "nothing to do" in run("train", folder / "job.toml", f"run.dir={whole}").stdout
    assert losses(whole) == before


@pytest.mark.slow
def test_the_same_job_again_is_the_same_run_bit_for_bit(whole, folder):
    """With other pages for malloc, so that a difference in memory would show too."""
    run("train", folder / "job.toml", f"run.dir={folder}/again", env=os.environ | {"JAXPAR_NO_HUGE_PAGES": "1"})
    assert losses(folder / "again") == losses(whole)


@pytest.mark.spread(0)
@pytest.mark.parametrize("number", some([signal.SIGTERM, signal.SIGINT], [], [signal.SIGTERM]))
def test_a_signal_finishes_the_step_saves_and_goes_on(whole, folder, number):
    target = folder / f"stopped{number}"
    with start("train", folder / "job.toml", f"run.dir={target}") as process:
        wait_for(process, "step")
        process.send_signal(number)
        out, _ = process.communicate(timeout=120)
    assert process.returncode == 128 + number
    assert f"stopped by {number.name}" in out
    assert rows(target)[-1]["step"] < 40
    assert "on from step" in run("train", folder / "job.toml", f"run.dir={target}").stdout
    got, want = losses(target), losses(whole)
    assert {step: row[:2] for step, row in got.items()} == {step: row[:2] for step, row in want.items()}
    # at most the step that the signal ended has not been evaluated, and no other has
    assert sum(got[step] != row for step, row in want.items()) <= 1


@pytest.mark.nightly
def test_a_command_that_is_killed_goes_on_with_the_same_losses(whole, folder):
    """Twice, while it trains; `train/test_kills.py` kills more often, and at worse moments."""
    target, moments = folder / "killed", random.Random(0)
    for _ in range(2):
        with start("train", folder / "job.toml", f"run.dir={target}", "checkpoint.every=1") as process:
            wait_for(process, "4 x cpu")  # it trains from here on, so that every kill hits work
            time.sleep(moments.uniform(0.5, 2.0))
            process.kill()
            process.communicate()
        assert process.returncode in (-signal.SIGKILL, 0)
    run("train", folder / "job.toml", f"run.dir={target}", "checkpoint.every=1")
    assert losses(target) == losses(whole)


class Stop(io.StringIO):
    """Hears what a run says, and asks it to stop once that begins so."""

    def __init__(self, beginning):
        super().__init__()
        self.beginning = beginning

    def write(self, text):
        if text.strip().startswith(self.beginning):
            signal.raise_signal(signal.SIGTERM)
        return super().write(text)


EIGHT = ["mesh.simulate=8", "train.global_batch=16", "train.steps=20", "model.layers=2"]
LAYOUTS = {
    "data": ["parallel.data=8", "parallel.fsdp=1"],
    "fsdp and tensor": ["parallel.data=2", "parallel.fsdp=2", "parallel.tensor=2"],
    "pipe": ["parallel.pipe=2", "parallel.data=2", "parallel.fsdp=2", "parallel.pipeline.microbatches=4"],
}


def here(job, target, layout, *overrides, stream=None):
    """Trains in this process, which has eight devices, and returns the losses of the run so far."""
    words = [f"run.dir={target}", *EIGHT, *LAYOUTS[layout], *overrides]
    train(load(job, words), stream=stream or io.StringIO())
    return losses(target)


@pytest.mark.full
def test_a_run_that_breaks_between_a_save_and_its_evaluation_evaluates_when_it_goes_on(tmp_path, monkeypatch):
    class Gone(BaseException):
        """Stands for a kill."""

    def gone(*_, **__):
        raise Gone

    job = write_job(tmp_path)
    words = ["checkpoint.every=1", "train.eval_every=2", "train.steps=4"]
    want = here(job, tmp_path / "in one", "data", *words)
    with monkeypatch.context() as patched:
        patched.setattr("jaxpar.train.loop.evaluate", gone)
        with pytest.raises(Gone):
            here(job, tmp_path / "broken", "data", *words)
    assert losses(tmp_path / "broken").keys() == {1, 2}
    got = here(job, tmp_path / "broken", "data", *words)
    assert got == want
    assert all(got[step][-1] is not None for step in (2, 4))


@pytest.mark.nightly
def test_a_pipeline_that_was_stopped_goes_on_bit_for_bit(folder):
    job, target = write_job(folder), folder / "pipe_stopped"
    want = here(job, folder / "pipe", "pipe")
    assert len(here(job, target, "pipe", stream=Stop("step 10"))) < 20
    said = io.StringIO()
    train(load(target / "job.toml"), stream=said)  # the resolved job has the pipeline too
    assert "on from step" in said.getvalue()
    assert {step: row[:2] for step, row in losses(target).items()} == {step: row[:2] for step, row in want.items()}


@pytest.fixture(scope="module")
def undisturbed(folder):
    return here(write_job(folder), folder / "undisturbed", "data", "model.dropout=0.0")


@pytest.mark.spread(1)
@pytest.mark.parametrize(
    "way",
    [
        pytest.param(way, id=" to ".join(way), marks=[pytest.mark.slow, pytest.mark.full][i % 2])
        for i, way in enumerate(itertools.pairwise([*LAYOUTS, "data"]))
    ],
)
def test_another_layout_goes_on_with_the_same_losses(folder, undisturbed, way):
    """A checkpoint knows no layout and no stages."""
    job, target = write_job(folder), folder / "-".join(way)
    assert len(here(job, target, way[0], "model.dropout=0.0", stream=Stop("step 10"))) < 20
    want, got = undisturbed, here(job, target, way[1], "model.dropout=0.0")
    assert got.keys() == want.keys()
    assert all(abs(got[step][0] - row[0]) < 2e-5 * abs(row[0]) for step, row in want.items())


@pytest.mark.slow
def test_text_is_sampled_from_a_run(whole):
    text = run("sample", whole, "--prompt", "12 squ", "--tokens", 20, "--temperature", 0).stdout
    assert text.startswith("12 squ")
    assert "squared" in text or "is" in text


def test_help_is_quick_and_imports_no_jax():
    seen = min(_timed_help() for _ in range(3))
    assert seen < 0.3
    modules = "import sys, jaxpar, jaxpar.cli.main as m; print('jax' in sys.modules, 'flax' in sys.modules)"
    out = subprocess.run([sys.executable, "-c", modules], capture_output=True, text=True, check=True).stdout
    assert out.split() == ["False", "False"]


def _timed_help():
    """Returns the seconds of a processor: those on the clock grow with whatever else this machine does."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    assert "train" in run("--help").stdout
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime - before.ru_utime + after.ru_stime - before.ru_stime
