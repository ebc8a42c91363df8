"""A run folder whose files were lost or damaged, or that is the user's own: said or refused, with the file's name."""

import json

import hooks
import pytest
from pairwise import some

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.file.run_folder import read_job
from jaxpar.job.run_weights import export_checkpoint
from jaxpar.job.sample import _text_job


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The files of a run of four steps."""
    folder = tmp_path_factory.mktemp("trained")
    hooks.run(folder, "train.steps=4", "train.eval_every=2")
    return {path.relative_to(folder): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture
def folder(trained, tmp_path):
    for path, content in trained.items():
        (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / path).write_bytes(content)
    return tmp_path


def lines(folder):
    return (folder / "metrics.jsonl").read_text().splitlines(keepends=True)


def go_on(folder):
    return hooks.run(folder, "train.steps=5", "train.eval_every=2")[1]


LOST = {  # rows that stay: what is said
    "the file": (None, "no row of 4 of the 4 steps before, the first of them step 1"),
    "all rows": (slice(0, 0), "no row of 4 of the 4 steps before, the first of them step 1"),
    "the last two": (slice(0, 2), "no row of 2 of the 4 steps before, the first of them step 3"),
    "the first": (slice(1, 4), "no row of 1 of the 4 steps before, the first of them step 1"),
}


@pytest.mark.nightly
@pytest.mark.parametrize(("left", "words"), some(LOST.values(), [LOST["all rows"]], [LOST["the last two"]]), ids=LOST)
def test_rows_that_are_lost_are_said_with_what_forgets_them(left, words, folder):
    file = folder / "metrics.jsonl"
    if left is None:
        file.unlink()
    else:
        file.write_text("".join(lines(folder)[left]))
    said = go_on(folder)
    assert f"{file} has {words}: train.patience and checkpoint.keep_best ignore their evaluations" in said


@pytest.mark.nightly
def test_a_run_that_has_all_its_rows_says_nothing(folder):
    said = go_on(folder)
    assert "has no row" not in said
    assert "is not there" not in said
    assert [json.loads(line)["step"] for line in lines(folder)] == [1, 2, 3, 4, 5]


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("job.toml", "what the job changes is not known"),
        pytest.param("run.json", "the data are those that it was trained on is", marks=pytest.mark.slow),
    ],
)
def test_a_lost_record_of_the_run_is_said_with_what_is_not_known(name, words, folder):
    (folder / name).unlink()
    said = go_on(folder)
    assert f"{folder}/{name} is not there: " in said
    assert words in said
    assert (folder / name).exists()


DAMAGED = {
    "a key that is none": lambda text: text.replace("[optimizer]", "[optimizer]\ntrops = 3"),
    "a value of another kind": lambda text: text.replace("warmup = ", 'warmup = "x" # '),
    "a section that is none": lambda text: text + "\n[trian]\nsteps = 3\n",
    "half a file": lambda text: text[: text.index("[train]") + 5],
    "no text": lambda text: b"\xff\xfe" + text.encode(),
    "brackets without end": lambda text: text + "\nx = " + "[" * 5000,
}


@pytest.mark.parametrize("damage", DAMAGED.values(), ids=DAMAGED)
@pytest.mark.parametrize("reader", [read_job, go_on, lambda folder: _text_job(folder, allow_import=False)])
def test_a_damaged_job_of_the_run_is_named_whoever_reads_it(reader, damage, folder):
    file = folder / "job.toml"
    damaged = damage(file.read_text())
    file.write_bytes(damaged if isinstance(damaged, bytes) else damaged.encode())
    with pytest.raises(JaxparError) as caught:
        reader(folder)
    assert all(str(file) in problem.got for problem in caught.value.problems), str(caught.value)
    assert all("mv " in problem.fix for problem in caught.value.problems)


def test_an_export_names_the_job_of_the_run(folder, tmp_path):
    (folder / "job.toml").write_text("[optimizer]\ntrops = 3\n")
    with pytest.raises(JaxparError) as caught:
        export_checkpoint(folder, None, tmp_path / "out")
    assert str(folder / "job.toml") in caught.value.problems[0].got
    (folder / "job.toml").unlink()
    with pytest.raises(JaxparError, match=r"holds no job\.toml"):
        export_checkpoint(folder, None, tmp_path / "out")


THEIRS = {
    "job.toml": hooks.JOB,
    "metrics.jsonl": '{"step": 1, "requests": 3}\n',
}


@pytest.mark.parametrize("name", THEIRS)
def test_a_file_of_the_user_s_is_not_replaced(name, tmp_path):
    (tmp_path / name).write_text(THEIRS[name])
    with pytest.raises(JaxparError) as caught:
        hooks.run(tmp_path, "train.steps=1")
    (problem,) = caught.value.problems
    assert f"{tmp_path}/{name} is not of a run" in problem.got
    assert problem.fix == "run.dir = 'runs/mine'"
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {name: THEIRS[name]}


def test_a_new_folder_of_jaxpar_s_own_keeps_its_job(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXPAR_NO_HUGE_PAGES", "1")  # it would start the tests anew
    assert main(["new", "mine"]) == 0
    monkeypatch.chdir(tmp_path / "mine")
    before = {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir()}
    for verb in ("check", "train"):
        assert main([verb, "job.toml", "run.dir=."]) == 1
        assert "job.toml is not of a run" in capsys.readouterr().err
    assert {path.name: path.read_bytes() for path in (tmp_path / "mine").iterdir() if path.is_file()} == before


@pytest.mark.nightly
def test_what_a_run_that_was_killed_at_its_start_left_is_its_own(tmp_path):
    (tmp_path / "job.toml").write_text(dumps(loads(hooks.JOB, ["train.steps=3", f"run.dir={tmp_path}"])))
    (tmp_path / "metrics.jsonl").touch()
    outcome, _ = hooks.run(tmp_path, "train.steps=1")
    assert outcome["step"] == 1
    assert (tmp_path / "job.0001.toml").exists()
