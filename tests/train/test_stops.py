"""A run that is told to stop, or that breaks at its very end: it saves at once, says so, and loses nothing."""

import signal
import subprocess
import sys

import hooks
import pytest

from jaxpar.checkpoint import Checkpoints, manifest, processes, writing
from jaxpar.job.file.parse import loads
from jaxpar.supervisor import Attempt, Launch, ProcessExit, supervise


@pytest.mark.slow
def test_a_stop_saves_at_once_and_evaluates_not_at_all(tmp_path):
    asked = []
    outcome, said = hooks.run(tmp_path, batch=hooks.signalling(signal.SIGTERM, 4), evaluation=asked.append)
    assert (outcome["stopped_by"], outcome["step"]) == ("SIGTERM", 5)
    assert asked == []
    assert hooks.saved(tmp_path) == [5]
    assert said.index("SIGTERM: saving step 5") < said.index("stopped by SIGTERM, saved step 5")


@pytest.mark.nightly
def test_a_stop_in_an_evaluation_breaks_it_off(tmp_path, monkeypatch):
    monkeypatch.setattr(hooks.Hooked, "held_out", 40)
    asked, send = [], hooks.signalling(signal.SIGTERM, 1)
    outcome, _ = hooks.run(tmp_path, "train.eval_every=3", evaluation=lambda index: (asked.append(index), send(index)))
    assert outcome["stopped_by"] == "SIGTERM"
    assert asked[-2:] == [0, 1]  # before, the first is asked for to see whether there is one
    assert max(asked) == 1
    assert hooks.saved(tmp_path)
    assert not any("eval_loss" in row for row in hooks.rows(tmp_path))


@pytest.mark.nightly
def test_a_stopped_run_evaluates_at_its_end_when_it_goes_on(tmp_path):
    hooks.run(tmp_path, batch=hooks.signalling(signal.SIGTERM, 7))
    assert "eval_loss" not in hooks.rows(tmp_path)[-1]
    outcome, _ = hooks.run(tmp_path)
    assert (outcome["stopped_by"], outcome["step"]) == (None, 8)
    assert [row["step"] for row in hooks.rows(tmp_path) if "eval_loss" in row] == [8]
    assert "eval_loss" in manifest.read(tmp_path / "checkpoints" / "000008").scores
    asked = []
    hooks.run(tmp_path, evaluation=asked.append)
    assert asked == []


@pytest.mark.nightly
def test_an_error_in_the_last_evaluation_loses_nothing(tmp_path):
    def breaks(index):
        raise FileNotFoundError("held out")

    with pytest.raises((FileNotFoundError, ValueError), match="held out"):
        hooks.run(tmp_path, evaluation=breaks)
    assert hooks.saved(tmp_path) == [8]
    assert [row["step"] for row in hooks.rows(tmp_path)] == list(range(1, 9))
    trained = []
    outcome, _ = hooks.run(tmp_path, batch=trained.append)
    assert (set(trained), outcome["step"]) == ({0}, 8)  # the first, for its shapes
    assert "eval_loss" in hooks.rows(tmp_path)[-1]


@pytest.mark.nightly
def test_the_last_step_is_on_the_disk_before_it_is_evaluated(tmp_path):
    there = []
    hooks.run(tmp_path, evaluation=lambda index: there.append(hooks.saved(tmp_path)))
    assert there == [[8]] * 3
    checkpoint = tmp_path / "checkpoints" / "000008"
    assert manifest.check(checkpoint) == []
    scores = manifest.read(checkpoint).scores
    assert scores["eval_loss"] == hooks.rows(tmp_path)[-1]["eval_loss"]


@pytest.mark.nightly
def test_the_best_are_kept_by_scores_that_came_later(tmp_path):
    hooks.run(tmp_path, "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1", "train.eval_every=2")
    scores = {row["step"]: row["eval_loss"] for row in hooks.rows(tmp_path) if "eval_loss" in row}
    assert sorted(scores) == [2, 4, 6, 8]
    assert hooks.saved(tmp_path) == sorted({8, min(scores, key=lambda step: scores[step])})
    rising = tmp_path / "rising"
    hooks.run(rising, "checkpoint.every=2", "checkpoint.keep_last=1", "checkpoint.keep_best=1", "train.eval_every=2",
        "optimizer.learning_rate=0.9")  # fmt: skip
    scores = {row["step"]: row["eval_loss"] for row in hooks.rows(rising) if "eval_loss" in row}
    assert hooks.saved(rising) == sorted({8, min(scores, key=lambda step: scores[step])})


@pytest.mark.nightly
def test_a_signal_in_the_last_save_does_not_end_it(tmp_path, monkeypatch):
    hooks.run(tmp_path / "warm")  # so that the second is quick, and its write the slowest part
    write = manifest.write

    def signalled(*folder, **about):
        signal.raise_signal(signal.SIGTERM)
        return write(*folder, **about)

    with hooks.unharmed(signal.SIGTERM) as met:
        monkeypatch.setattr(manifest, "write", signalled)
        outcome, _ = hooks.run(tmp_path / "run")
    assert met == []
    assert outcome["stopped_by"] == "SIGTERM"
    assert hooks.saved(tmp_path / "run") == [8]


@pytest.mark.nightly
def test_a_checkpoint_is_written_every_30_minutes_by_default(tmp_path, monkeypatch):
    """With steps of 11 minutes: the third is late."""
    minutes = [0.0]

    def later(index):
        minutes[0] += 11.0

    monkeypatch.setattr(writing, "seconds", lambda: minutes[0] * 60)
    job = loads(hooks.JOB)
    assert (job.checkpoint.every, job.checkpoint.minutes) == (0, 30.0)
    hooks.run(tmp_path / "timed", "checkpoint.keep_last=9", batch=later)
    assert hooks.saved(tmp_path / "timed") == [3, 6, 8]
    hooks.run(tmp_path / "never", "checkpoint.keep_last=9", "checkpoint.minutes=0", batch=later)
    assert hooks.saved(tmp_path / "never") == [8]


@pytest.mark.parametrize("slow", [0.05, 1.0, 700.0])
def test_all_processes_save_after_the_same_step_whatever_their_clocks_say(slow, monkeypatch):
    """Three processes whose clocks run apart; only what process 0 finds is told, and not at every step."""
    asked: list[int] = []
    found = {}
    for process, pace in enumerate((1.0, 0.3, 5.0)):
        now, told = [0.0], iter(list(asked))

        def tell(value, process=process, told=told):
            if process == 0:
                asked.append(value)
                return value
            return next(told)

        monkeypatch.setattr(processes, "broadcast", tell)
        monkeypatch.setattr(writing, "seconds", lambda now=now: now[0])
        clock, saves = writing.SaveSchedule(Checkpoints(every=9000, minutes=10.0), start=0), []
        for step in range(1, 20_001):
            now[0] += slow * pace
            if clock.is_due(step):
                saves.append((step, now[0]))
        found[process] = [step for step, _ in saves]
        if process == 0:
            gaps = [b - a for (_, a), (_, b) in zip([(0, 0.0), *saves], saves, strict=False)]
            assert max(gaps) <= 600 + 2 * slow
            assert len(asked) <= 14 * (len(saves) + 1)
    assert found[0] == found[1] == found[2]
    assert {9000, 18000} <= set(found[0])


@pytest.mark.nightly
def test_a_stopped_run_ends_with_a_status_of_its_own(tmp_path):
    (tmp_path / "job.toml").write_text(hooks.JOB.replace("devices = 2", "simulate = 2").replace("hooks:", "told:"))
    (tmp_path / "told.py").write_text(
        "import os, signal\nfrom hooks import made\nclass Hooked:\n    fingerprint = 'told'\n"
        "    def batch(self, step, size):\n        if step == 2:\n            os.kill(os.getpid(), signal.SIGTERM)\n"
        "        return made(step, size)\n"
    )
    environment = {"PYTHONPATH": ":".join(sys.path), "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    words = [sys.executable, "-m", "jaxpar", "train", "job.toml", "--allow-import"]
    done = subprocess.run(
        words, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False, timeout=120
    )
    assert done.returncode == 128 + signal.SIGTERM, done.stdout + done.stderr
    assert "SIGTERM: saving step 3" in done.stdout


@pytest.mark.parametrize(
    ("statuses", "starts"), [([143, 143], 1), ([143, -6], 1), ([130], 1), ([-15, 75], 4), ([9], 4)]
)
def test_a_run_that_was_stopped_on_purpose_is_not_started_again(statuses, starts, monkeypatch):
    ended = [ProcessExit(process, 100 + process, status, 1.0) for process, status in enumerate(statuses)]
    monkeypatch.setattr(Attempt, "run", lambda self, stop: ended)
    result = supervise(Launch(command=["train"], processes=len(statuses)), progress=lambda: -1, log=str)
    assert len(result["attempts"]) == starts
    assert result["status"] == (statuses[0] if starts == 1 else 1)


@pytest.mark.nightly
def test_a_second_ctrl_c_ends_at_once_and_a_second_sigterm_does_not(tmp_path):
    def twice(number):
        def hook(index):
            if index == 2:
                signal.raise_signal(signal.SIGTERM)
                signal.raise_signal(number)

        return hook

    with hooks.unharmed(signal.SIGTERM):
        outcome, _ = hooks.run(tmp_path / "terminated", batch=twice(signal.SIGTERM))
        assert (outcome["stopped_by"], hooks.saved(tmp_path / "terminated")) == ("SIGTERM", [3])
        with pytest.raises(KeyboardInterrupt):
            hooks.run(tmp_path / "interrupted", batch=twice(signal.SIGINT))
    assert not (tmp_path / "interrupted" / "checkpoints").exists()
