"""A job of a user's own model starts from a Hugging Face folder by rules, and is exported to one again."""

import inspect
import json
import sys

import jax.numpy as jnp
import numpy as np
import pytest
from test_own_models import RULES, SAVED, TOKENS, Attention, Block, Llama, rotate

import jaxpar as jp
from jaxpar.checkpoint import Checkpoints
from jaxpar.cli.main import main
from jaxpar.models.huggingface.safetensors import entries

JOB = """
model = {{name = "own_llama:Llama"}}
data = {{source = "arrays", path = "tokens.npz"}}
train = {{steps = 2, global_batch = 8}}
checkpoint = {{start_from = "{folder}", rules = "own_llama:RULES"{more}}}
optimizer = {{learning_rate = {rate}}}
mesh = {{simulate = 8}}
parallel = {{data = 2, fsdp = 4}}
run = {{dir = "run"}}
"""
HEAD = "from functools import partial\nimport jax\nimport jax.numpy as jnp\nfrom flax import nnx\n"
FOLDER = SAVED / "llama"


@pytest.fixture
def jaxpar(tmp_path, monkeypatch, capsys):
    """Writes a job into an empty folder, and runs commands there."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("JAXPAR_NO_HUGE_PAGES", "1")  # which would start the tests anew
    monkeypatch.setattr(sys, "path", [*sys.path])
    monkeypatch.delitem(sys.modules, "own_llama", raising=False)
    code = [inspect.getsource(part) for part in (Attention, rotate, Block, Llama)]
    (tmp_path / "own_llama.py").write_text("\n".join([HEAD, *code, f"RULES = {RULES!r}\n"]))
    x = np.random.default_rng(0).integers(0, 40, (16, 12)).astype(np.int32)
    np.savez("tokens.npz", inputs=x, targets=np.roll(x, -1, axis=1))

    def run(*words, rate=1e-9, folder=FOLDER, more=""):
        (tmp_path / "job.toml").write_text(JOB.format(folder=folder, rate=rate, more=more))
        status = main([*words])
        return status, "".join(capsys.readouterr())

    return run


@pytest.mark.nightly
def test_a_job_of_an_own_model_starts_from_the_folder_and_is_written_back(tmp_path, jaxpar):
    status, text = jaxpar("train", "job.toml")
    assert status == 0, text
    assert "21 arrays taken from" in text
    assert "read by own_llama:RULES" in text
    model = jp.model(tmp_path / "run")
    assert type(model).__module__ == "own_llama"
    want = np.load(FOLDER / "logits.npy", allow_pickle=False)  # of transformers
    np.testing.assert_allclose(model(jnp.asarray(TOKENS)), want, rtol=1e-5, atol=1e-5)
    status, text = jaxpar("checkpoint", "export", "run", "--format", "safetensors", "--to", "out")
    assert status == 0, text
    before, after = entries(FOLDER / "model.safetensors"), entries(tmp_path / "out" / "model.safetensors")
    assert before.keys() == after.keys()
    for name, entry in before.items():  # two steps of 1e-9
        np.testing.assert_allclose(after[name].view(), entry.view(), atol=1e-7)
    assert json.loads((tmp_path / "out" / "config.json").read_text()) == json.loads(
        (FOLDER / "config.json").read_text()
    )


def test_rules_that_do_not_fit_are_found_by_the_check(tmp_path, jaxpar):
    (tmp_path / "other").mkdir()
    for options, message in (
        ({"more": ', skip = ["none.*"]'}, "skip: 'none.*' matches no tensor"),
        ({"more": ', take = ["norm"]'}, "with take or rename"),
        ({"folder": SAVED / "qwen3"}, "that no rule reads"),
        ({"folder": "other"}, "which has no config.json"),
    ):
        status, text = jaxpar("check", "job.toml", **options)
        assert status == 1
        assert message in text
    with pytest.raises(jp.JaxparError, match="without checkpoint"):
        Checkpoints(start_from="a", skip=("b",))
