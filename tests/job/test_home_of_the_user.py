"""A ~ at the beginning of a path is the user's home: in a job, in an override, and in Python."""

import io
import json
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.buckets import local_folder
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.file.parse import loads


@pytest.fixture(autouse=True)
def home(tmp_path, monkeypatch):
    (tmp_path / "home").mkdir()
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home"


def test_a_run_folder_below_home_is_there_and_no_folder_is_called_tilde(home, capsys):
    Path("text.txt").write_text("to be or not to be " * 40)
    job = loads("""
        model = {name = "decoder", layers = 1, dim = 8, heads = 1, vocab = 256}
        data = {source = "text", path = "text.txt", seq = 16}
        train = {steps = 1, global_batch = 2}
        mesh.devices = 1
        """, ["run.dir=~/runs/mine"])  # fmt: skip
    assert job.run.dir == f"{home}/runs/mine"
    run.train(job, stream=io.StringIO())
    assert (home / "runs/mine/metrics.jsonl").is_file()
    assert [path.name for path in Path().iterdir()] == ["text.txt"]
    assert main(["checkpoint", "ls", "~/runs/mine"]) == 0  # quoted, so that no shell expands it
    assert main(["report", "~/runs/mine"]) == 0
    words = ["checkpoint", "export", "~/runs/mine", "--to"]
    assert main([*words, "~/copy"]) == 0
    assert main([*words, "~/exported", "--format", "safetensors"]) == 0
    assert (home / "copy").is_dir()
    assert json.loads((home / "exported/config.json").read_text())["eos_token_id"] == 0  # written last
    assert [path.name for path in Path().iterdir()] == ["text.txt"]
    assert f"{home}/runs/mine/report.html" in capsys.readouterr().out


def test_python_saves_and_restores_below_home(home):
    layout = jp.compose(lambda rngs: nnx.Linear(2, 2, rngs=rngs), jp.Parallel(), jax.devices()[:1])
    optimizer = optax.sgd(0.1)
    step = jp.train_step(layout, lambda model, batch: (jnp.sum(model(batch["x"])), 2), optimizer)
    state = jp.init_state(layout, optimizer)
    assert jp.save("~/states", state) == home / "states/checkpoints/000000"
    restored = jp.restore("~/states", step)
    np.testing.assert_array_equal(restored.params["kernel"], state.params["kernel"])
    assert not list(Path().iterdir())


def test_the_home_of_an_unknown_user_is_refused():
    with pytest.raises(JaxparError, match="'~nobody-here/x'"):
        loads("", ["run.dir=~nobody-here/x"])
    with pytest.raises(JaxparError, match="'~nobody-here/x'"):
        jp.model("~nobody-here/x")


def test_a_folder_whose_name_begins_with_a_tilde_is_named_from_here_or_by_its_absolute_path(home):
    with pytest.raises(JaxparError) as caught:
        loads("", ["run.dir=~nobody-here"])
    absolute = str(Path.cwd() / "~nobody-here")
    assert caught.value.problems[0].fix == f"run.dir = '{absolute}', if a folder has that name"
    for name in ("./~nobody-here", absolute):
        job = loads("", [f"run.dir={name}"])
        assert job.run.dir == absolute
        assert str(local_folder(job.run.dir)) == str(local_folder(name)) == absolute
