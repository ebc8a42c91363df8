"""The fix of a refusal is something that a user can type, and that is not refused in turn."""

import io

import numpy as np
import pytest

from jaxpar.checkpoint import reading
from jaxpar.cli.main import main
from jaxpar.data.tokenizers.encoders import end_token
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file import run_folder
from jaxpar.job.file.parse import loads
from jaxpar.train.faults import LOWER_RATE

JOB = """
[parallel]
data = 8
[model]
name = "mlp"
hidden = 8
[data]
source = "digits"
[train]
loss = "classify"
steps = 2
global_batch = 8
"""


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    run.train(loads(JOB, [f"run.dir={folder}"]), stream=io.StringIO())
    return folder


@pytest.mark.nightly
def test_the_fix_of_a_loss_that_is_nan_is_not_refused_by_the_run_that_goes_on(trained):
    named = LOWER_RATE[LOWER_RATE.index("run.changed") :].replace(" ", "")
    lower = ["optimizer.learning_rate=1e-5", "optimizer.warmup=1", "train.steps=3"]
    job = loads(JOB, [f"run.dir={trained}", *lower])
    with pytest.raises(JaxparError, match=r"optimizer.learning_rate"):
        run_folder.check_changes(run_folder.compare_jobs(trained, job), job, 2)
    job = loads(JOB, [f"run.dir={trained}", *lower, named])
    run_folder.check_changes(run_folder.compare_jobs(trained, job), job, 2)


def test_a_key_that_a_run_did_not_have_is_to_be_left_out(trained):
    job = loads(JOB, [f"run.dir={trained}", "model.classes=11"])
    with pytest.raises(JaxparError) as caught:
        run_folder.check_changes(run_folder.compare_jobs(trained, job), job, 2)
    assert "not set;" not in str(caught.value)
    assert "leave model.classes out" in str(caught.value)


def test_the_fix_of_a_damaged_checkpoint_is_a_command_that_lists_the_good_ones(trained, capsys):
    path = trained / "checkpoints" / "000002"
    fix = reading.DamagedCheckpoint(path, ["an array is altered"]).problems[0].fix
    command = fix.split("`")[1].split()
    assert command[0] == "jaxpar"
    assert main(command[1:]) == 0
    assert "2" in capsys.readouterr().out


@pytest.mark.parametrize("end", ["</s>", "<|eot>"])
def test_the_tokens_that_may_end_a_document_are_special_ones(end, tmp_path):
    pytest.importorskip("tokenizers")
    import tokenizing

    kept = read_tokenizer(tokenizing.llama3(tmp_path))
    special = {"<|begin|>", "<|end_of_text|>", "<|start|>", "<|end|>", "<|eot|>"}
    with pytest.raises(JaxparError) as caught:
        end_token(kept, end)
    fix = caught.value.problems[0].fix
    assert any(token in fix for token in special)
    assert "</s>" not in fix


def test_a_file_that_is_not_there_names_how_one_is_made(tmp_path, capsys):
    assert main(["train", str(tmp_path / "nosuch.toml")]) == 1
    assert "jaxpar new mine" in capsys.readouterr().err


def test_numbers_of_processes_are_named_as_the_command_has_them(tmp_path, capsys):
    (tmp_path / "job.toml").write_text(JOB)
    assert main(["launch", "-n", "0", "train", str(tmp_path / "job.toml")]) != 0
    assert "--processes 1" in capsys.readouterr().err


def test_rows_of_tokens_are_written_as_the_fix_of_their_array_says(tmp_path):
    tokens, path = np.arange(64 * 17).reshape(64, 17) % 250, tmp_path / "tokens"
    np.save(f"{path}.npy", tokens)
    job = JOB.replace("mlp", "decoder").replace("classify", "next_token").replace("digits", "arrays")
    job = job.replace("hidden = 8", "dim = 8\nlayers = 1\nheads = 2\nkv_heads = 2\nseq = 16\nvocab = 256\nhidden = 8")
    (problem,) = check(loads(job, [f"data.path={path}.npy"]))
    assert problem.rule == "the loss next_token is computed from arrays named inputs and targets"
    eval(problem.fix.partition(";")[0], {"np": np, "path": path, "tokens": tokens})
    assert check(loads(job, [f"data.path={path}.npz"])) == []
