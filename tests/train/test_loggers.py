"""Each logger by name shows what RUN/metrics.jsonl has: no step twice and none missing, after kills and rollbacks."""

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import logged_run
import pytest
from logged_run import expected

from jaxpar.errors import JaxparError
from jaxpar.train.loggers.base import LoggedRun
from jaxpar.train.loggers.services import LOGGERS, check_name
from jaxpar.train.metrics import Log

SCRIPT = Path(logged_run.__file__)


def needs(name):
    missing = [module for module in LOGGERS[name].libraries if find_spec(module) is None]
    return pytest.param(name, marks=pytest.mark.skipif(bool(missing), reason=f"{missing} not installed"))


loggers = pytest.mark.parametrize("name", [needs(name) for name in LOGGERS])


def run(*words):
    """Runs the script in a process group of its own, which a kill ends whole, with a library's own service."""
    env = {key: value for key, value in os.environ.items() if not key.startswith(("WANDB", "MLFLOW", "TRACKIO"))}
    env |= {"WANDB_MODE": "offline", "PYTHONPATH": str(SCRIPT.parents[1]), "MLFLOW_DISABLE_TELEMETRY": "true"}
    command = [sys.executable, str(SCRIPT), *map(str, words)]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, start_new_session=True, timeout=120)
    assert ended.returncode == (-9 if "kill" in words else 0), ended.stderr
    return ended.stdout


def read(folder, name):
    curves, texts = json.loads(run(folder, "read", name, "-").splitlines()[-1])
    return {key: [tuple(point) for point in points] for key, points in curves.items()}, texts


def close(curves, wanted):
    """Whether the curves are equal, up to the float32 that TensorBoard writes."""
    return curves == {key: [(step, pytest.approx(value, rel=1e-6)) for step, value in wanted[key]] for key in wanted}


@pytest.mark.spread(1)
@pytest.mark.slow
@loggers
def test_a_killed_run_goes_on_without_a_gap_and_without_a_step_twice(name, tmp_path):
    folder = tmp_path / "run"
    run(folder, name, 0, 8, "kill")
    first = json.loads((folder / "loggers.json").read_text()) if name != "tensorboard" else None
    run(folder, name, 5, 6, "kill")  # goes back by three steps, and ends before the step where it was
    run(folder, name, 6, 12)
    curves, texts = read(folder, name)
    assert close(curves, expected(1, 12)), curves
    if first:
        assert json.loads((folder / "loggers.json").read_text()) == first  # one id
    assert "kernel  fsdp" in str(texts)
    assert "steps = 12" in str(texts)
    assert "1.2.3" in str(texts)
    assert "RUN/report.html" in str(texts)


@pytest.mark.spread(1)
@pytest.mark.slow
@loggers
def test_steps_that_have_other_values_replace_those_before(name, tmp_path):
    folder = tmp_path / "run"
    run(folder, name, 0, 8)
    run(folder, name, 4, 10, 3.0)  # such as `--from 4` with another learning rate
    curves, _ = read(folder, name)
    old, new = expected(1, 4), expected(5, 10, 3.0)
    assert close(curves, {key: old[key] + new[key] for key in old}), curves


@loggers
def test_a_logger_that_joins_late_has_the_rows_before(name, tmp_path):
    folder = tmp_path / "run"
    folder.mkdir()
    log = Log(folder, start=0)
    for step, loss in expected(1, 6)["loss"]:
        log.write({"step": step, "loss": loss})
        if step % logged_run.EVERY == 0:
            log.amend({"eval_loss": 2 * loss}, step=step)
    log.close()
    run(folder, name, 6, 9)
    curves, _ = read(folder, name)
    assert close(curves, expected(1, 9)), curves


@pytest.mark.parametrize("name", [needs("tensorboard")])
def test_tensorboard_has_a_row_on_the_disk_when_its_logger_returns(name, tmp_path):
    """So the row survives a kill, and is there before the checkpoint of its step."""
    logger = LOGGERS[name].kind()
    logger.begin(LoggedRun(folder=tmp_path))
    for step in range(1, 21):
        logger.log(step, {"loss": 1 / step})
        curves, _ = logged_run.read_tensorboard(tmp_path)
        assert [point for point, _ in curves["loss"]] == [*range(1, step + 1)]
    logger.close()


def test_tensorboard_itself_reads_the_same(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    for words in ((0, 8, "kill"), (5, 6, "kill"), (6, 12)):
        run(tmp_path / "run", "tensorboard", *words)
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    curves = {key: [(event.step, event.value) for event in events.Scalars(key)] for key in ("loss", "eval_loss")}
    assert close(curves, expected(1, 12)), curves


def test_a_logger_of_the_user_begins_and_begins_again_after_a_rollback(tmp_path):
    class Mine:
        begun, seen = [], []

        def begin(self, run):
            self.begun.append((run.step, run.repeats, [step for step, _ in run.rows()], run.config))

        def log(self, step, values):
            self.seen.append((step, values))

    mine = Mine()
    log = Log(tmp_path, start=0, loggers=[mine], run=LoggedRun(folder=tmp_path, config={"a": 1}))
    for step in (1, 2, 3):
        log.write({"step": step, "loss": 1.0})
    log.rewind(1)
    log.write({"step": 2, "loss": 1.0})
    log.amend({"eval_loss": 2.0}, step=2)
    log.amend({"eval_loss": 2.0}, step=2)  # evaluated again: the logger has it
    log.close()
    assert mine.begun == [(0, True, [], {"a": 1}), (1, False, [1], {"a": 1})]
    assert [step for step, _ in mine.seen] == [1, 2, 3, 2, 2]


def test_a_logger_that_cannot_begin_gets_no_rows_and_the_run_goes_on(tmp_path):
    class Absent:
        def begin(self, run):
            raise ConnectionError("no such server")

        def log(self, step, values):
            raise AssertionError

    lines = []
    log = Log(tmp_path, start=0, loggers=[Absent()], say=lines.append)
    log.write({"step": 1, "loss": 1.0})
    log.close()
    assert len(lines) == 1
    assert "no such server" in lines[0]
    assert "training goes on" in lines[0]


@pytest.mark.parametrize("name", LOGGERS)
def test_a_library_that_is_not_installed_is_named_with_its_extra(name, monkeypatch):
    monkeypatch.setattr("jaxpar.train.loggers.services.find_spec", lambda module: None)
    with pytest.raises(JaxparError, match=rf"pip install 'jaxpar\[{name}\]'"):
        check_name(name, "metrics.loggers")
