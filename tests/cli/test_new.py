"""`jaxpar new` writes a folder that trains, and whose own test passes."""

import json
import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from terminal import said

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError, user_code_errors
from jaxpar.job.file.parse import load

ROOT = Path(__file__).parents[2]


def test_a_folder_has_a_job_and_all_that_it_names(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    assert "cd mine && jaxpar train && pytest" in capsys.readouterr().out
    job = load(tmp_path / "mine" / "job.toml")
    for named in (job.model["name"], job.train.loss, job.data.source):
        module, _, name = named.partition(":")
        assert name in (tmp_path / "mine" / f"{module}.py").read_text()
    assert (tmp_path / "mine" / "test_mine.py").exists()


@pytest.mark.nightly
def test_a_new_folder_trains_and_its_test_passes(tmp_path):
    own = {**os.environ, "PYTHONPATH": str(ROOT)}
    for name in ("JAX_PLATFORMS", "XLA_FLAGS", "PYTEST_ADDOPTS", "PYTEST_XDIST_WORKER"):
        own.pop(name, None)

    def ran(where, *words):
        return subprocess.run(
            [sys.executable, "-m", *words], cwd=where, env=own, capture_output=True, text=True, timeout=500, check=True
        ).stdout

    ran(tmp_path, "jaxpar", "new", "mine")
    folder = tmp_path / "mine"
    ran(folder, "jaxpar", "train")
    rows = [json.loads(line) for line in (folder / "runs" / "job" / "metrics.jsonl").read_text().splitlines()]
    assert rows[-1]["step"] == 200
    assert rows[-1]["eval_loss"] < rows[0]["loss"] / 10
    assert 0 < rows[-1]["eval_near"] <= 1
    assert "1 passed" in ran(folder, "pytest", "-q", "-p", "no:cacheprovider")


@pytest.mark.parametrize(
    ("name", "said"),
    [("a b", "begins with a letter"), ("../x", "begins with a letter"), ("full", "is not empty"), ("file", "file")],
)
def test_a_folder_that_cannot_be_new_is_refused(name, said, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine.txt").write_text("kept")
    (tmp_path / "file").write_text("kept")
    assert main(["new", name]) == 1
    assert said in capsys.readouterr().err


def test_train_without_a_job_says_where_one_would_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["train"]) == 1
    assert "in a folder without a job.toml" in capsys.readouterr().err


@pytest.mark.nightly
def test_a_terminal_says_from_the_start_what_is_waited_for(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["new", "mine"]) == 0
    own = {**os.environ, "PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "120"}
    heard = said(["train", "train.steps=3"], cwd="mine", env=own)
    waits = (b"starting", b"reading the data", b"compiling the step, ", b"step 3/3")
    at = [heard.find(each) for each in waits]
    assert -1 not in at
    assert at == sorted(at)


def test_an_error_of_the_users_code_begins_with_its_line(tmp_path):
    (tmp_path / "mine.py").write_text("def loss():\n    return {}['nothing']\n\n\nloss()\n")
    with pytest.raises(JaxparError) as caught, user_code_errors("the loss", rule="a rule", fix="a fix"):
        runpy.run_path(str(tmp_path / "mine.py"))
    first, second, *_ = str(caught.value).splitlines()
    assert first == "mine.py, line 2: return {}['nothing']"
    assert second.startswith("  the loss: no entry 'nothing'")
