"""What `train` refuses before its first step, without a step being needed for it, `jaxpar check` refuses too."""

import errno
import io
import json
import os
import tempfile
from pathlib import Path

import jax
import pytest
from pairwise import some

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check, resolve
from jaxpar.job.file.parse import load, loads

JOB = """
[parallel]
data = 8
[model]
name = "mlp"
hidden = 8
[data]
source = "digits"
[optimizer]
learning_rate = 0.1
[train]
loss = "classify"
steps = 2
global_batch = 8
[metrics]
show_every = 1
"""


def test_sizes_that_do_not_fit_the_devices_are_one_problem_whether_the_devices_are_here_or_not():
    job = loads(JOB, ["parallel.data=4"])
    assert len(check(job)) == 1
    assert resolve(job, jax.devices()).problems == tuple(check(job))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run of two steps, which no test changes."""
    folder = tmp_path_factory.mktemp("trained")
    (folder / "job.toml").write_text(JOB)
    run.train(load(folder / "job.toml", [f"run.dir={folder / 'run'}"]), stream=io.StringIO())
    return folder / "run"


@pytest.fixture
def copy(trained, tmp_path, monkeypatch):
    """A copy of that run in ./run, and the job in ./job.toml."""
    import shutil

    monkeypatch.chdir(tmp_path)
    shutil.copytree(trained, "run")
    Path("job.toml").write_text(JOB)


def refused_by_both(capsys, words, *overrides):
    """Asserts that `jaxpar check` and `train` refuse the job with the same words, and that no folder is left behind."""
    before = sorted(map(str, Path.cwd().rglob("*")))
    assert main(["check", "job.toml", *overrides]) == 1
    out = capsys.readouterr()
    assert words in out.err
    assert "Traceback" not in out.err
    assert sorted(map(str, Path.cwd().rglob("*"))) == before
    with pytest.raises(JaxparError) as caught:
        run.train(load("job.toml", overrides), stream=io.StringIO())
    assert words in str(caught.value)
    return out.err


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    Path("file").write_text("")
    Path("nowhere").symlink_to("gone")


IMPOSSIBLE = {
    "a device": ("/dev/null/x", "is a file"),
    "a file": ("file", "is a file"),
    "below a file": ("file/deep/down", "is a file"),
    "a link to nothing": ("nowhere", "is a link to nothing"),
    "5,000 letters": ("x" * 5000, "File name too long"),
    "300 letters in a folder that is missing": ("a/" + "x" * 300, "File name too long"),
    "a null byte": ("a\0b", "null"),
    "another's file system": ("/proc/x", "No such file or directory"),
}


@pytest.mark.parametrize(
    ("folder", "words"),
    some(IMPOSSIBLE.values(), [("nowhere", "is a link to nothing"), ("/proc/x", "No such file or directory")]),
    ids=IMPOSSIBLE,
)
def test_a_run_folder_that_cannot_be_made(folder, words, here, capsys):
    Path("with.toml").write_text(JOB + f"[run]\ndir = {json.dumps(folder)}\n")
    Path("job.toml").write_bytes(Path("with.toml").read_bytes())
    assert "run.dir" in refused_by_both(capsys, words)


def test_a_run_folder_without_permission(here, capsys, monkeypatch):
    """As the superuser may write everywhere, the system's refusal is played."""

    def denied(*args, **kwargs):
        raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

    monkeypatch.setattr(tempfile, "mkdtemp", denied)
    assert main(["check", "job.toml", "run.dir=mine"]) == 1
    assert "run.dir = 'mine' cannot be written: Permission denied" in capsys.readouterr().err


def test_a_sound_job_is_ok_and_leaves_nothing_behind(here, capsys):
    before = sorted(map(str, Path.cwd().rglob("*")))
    assert main(["check", "job.toml", "run.dir=a/b/c"]) == 0
    assert capsys.readouterr().out.startswith("ok: ")
    assert sorted(map(str, Path.cwd().rglob("*"))) == before


@pytest.mark.parametrize("name", ["checkpoints", "data"])
def test_a_file_where_the_run_has_a_folder(name, here, capsys):
    Path("mine").mkdir()
    Path("mine", name).write_text("")
    refused_by_both(capsys, f"mine/{name} is a file", "run.dir=mine")


@pytest.mark.parametrize(
    "name",
    [
        pytest.param("job.toml", marks=pytest.mark.slow),
        pytest.param("run.json", marks=pytest.mark.slow),
        "metrics.jsonl",
    ],
)
def test_a_folder_where_the_run_has_a_file(name, here, capsys):
    Path("mine", name).mkdir(parents=True)
    refused_by_both(capsys, f"mine/{name} is a folder", "run.dir=mine")


@pytest.mark.parametrize(
    "where",
    [
        pytest.param("runs/nothing", marks=pytest.mark.slow),
        pytest.param("file", marks=pytest.mark.slow),
        "x" * 5000,
        pytest.param(".", marks=pytest.mark.slow),
    ],
)
def test_a_start_from_that_is_not_there(where, here, capsys):
    problems = check(load("job.toml", [f"checkpoint.start_from={where}", "run.dir=mine"]))
    assert len(problems) == 1
    refused_by_both(capsys, problems[0].got, f"checkpoint.start_from={where}", "run.dir=mine")


@pytest.mark.nightly
def test_a_run_that_has_begun_does_not_look_for_its_beginning_again(copy, capsys):
    assert main(["check", "job.toml", "run.dir=run", "checkpoint.start_from=runs/nothing"]) == 0


MISFITS = {
    "another width": (["model.hidden=16"], "in the checkpoint"),
    "a pattern of nothing": (['checkpoint.take=["hed/*"]'], "'hed/*' matches nothing"),
    "a name of nothing": (['checkpoint.rename={"old" = "new"}'], "begins with 'old'"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("overrides", "words"),
    some(MISFITS.values(), [MISFITS["another width"]], [MISFITS["a name of nothing"]]),
    ids=MISFITS,
)
def test_a_start_from_that_does_not_fit(overrides, words, copy, capsys):
    refused_by_both(capsys, words, "checkpoint.start_from=run", "run.dir=mine", *overrides)


def test_a_start_from_that_fits_is_ok(copy, capsys):
    assert main(["check", "job.toml", "checkpoint.start_from=run", "run.dir=mine"]) == 0


CHANGES = {
    "another seed": (["train.seed=7"], "train.seed = 7, it was 0, up to step 2"),
    "more held out": (["data.held_out=0.5"], "holds out the same examples"),
    "a width, named as changed": (["model.hidden=16", 'run.changed=["model.hidden"]'], "in the checkpoint"),
    "a name that is no key": (['run.changed=["train.sead"]'], "did you mean 'train.seed'?"),
    "never": (["run.resume=never"], "has checkpoints up to step 2"),
    "must": (["run.resume=must", "run.dir=mine"], "has no checkpoint"),
}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("overrides", "words"), some(CHANGES.values(), [CHANGES["never"], CHANGES["must"]]), ids=CHANGES
)
def test_a_run_that_cannot_go_on(overrides, words, copy, capsys):
    refused_by_both(capsys, words, "run.dir=run", *overrides)


DAMAGE = {
    "half a job": ("job.toml", "[train\n", "run/job.toml is damaged"),
    "no text": ("job.toml", "\xff\xfe", "run/job.toml is damaged"),
    "half a record": ("run.json", '{"data"', "run/run.json is damaged"),
    "a record without data": ("run.json", "{}", "run/run.json is damaged"),
    "a record that is no table": ("run.json", "[]", "run/run.json is damaged"),
    "a record of other data": ("run.json", '{"data": "others"}', "was trained on data others"),
    "a checkpoint without a list": ("checkpoints/000002/MANIFEST", "", "checkpoints/000002"),
}


@pytest.mark.parametrize(
    ("name", "text", "words"), some(DAMAGE.values(), [("job.toml", "[train\n", "run/job.toml is damaged")]), ids=DAMAGE
)
def test_a_run_whose_files_are_damaged(name, text, words, copy, capsys):
    Path("run", name).write_text(text, encoding="latin-1")
    refused_by_both(capsys, words, "run.dir=run")


@pytest.mark.nightly
def test_a_run_that_may_go_on_is_ok(copy, capsys):
    assert main(["check", "job.toml", "run.dir=run"]) == 0
    assert main(["check", "job.toml", "run.dir=run", "train.steps=4"]) == 0
