"""A path that leads to no model, tokenizer or run says so, and names the nearest one that is there."""

import json
from pathlib import Path

import pytest

from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.errors import JaxparError
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.job.sample import SamplingRequest, load_text_model


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    """Two folders with a config.json, hf/llama and gpt, one without, and a file beside each config."""
    monkeypatch.chdir(tmp_path)
    for name in ("hf/llama", "gpt", "empty"):
        Path(name).mkdir(parents=True)
    for name in ("hf/llama", "gpt"):
        Path(name, "config.json").write_text(json.dumps({"model_type": "llama"}))
    Path("hf/llama/model.safetensors").write_bytes(b"")
    Path("empty/model.safetensors").write_bytes(b"")


MODELS = {
    "hf/lama": ("hf/lama': no such folder", "did you mean 'hf/llama'?"),
    "./hf/lama": ("no such folder", "did you mean 'hf/llama'?"),
    "nowhere/at/all": ("no such folder", "the path of a folder that is there"),
    "/nowhere": ("no such folder", "the path of a folder that is there"),
    "~/nowhere-at-all": ("no such folder", "the path of a folder that is there"),
    "~nobody-of-this-name/x": ("model.name = '~nobody-of-this-name/x': ", "one of: alexnet, decoder"),
    "meta-llama/Llama-3.1-8B": ("no such folder", "hf download meta-llama/Llama-3.1-8B --local-dir Llama-3.1-8B"),
    "empty": ("is a folder without config.json", "save_pretrained"),
    "hf/llama/config.json": ("is a file", 'name = "hf/llama"'),
    "hf/llama/model.safetensors": ("is a file", 'name = "hf/llama"'),
    "empty/model.safetensors": ("is a file", "save_pretrained"),
    "Decoder": ("no such model or folder", "did you mean 'decoder'?"),
    "gtp": ("no such model or folder", "did you mean 'gpt'?"),
    "zzzzzz": (
        "no such model or folder",
        "one of: alexnet, decoder, googlenet, mlp, resnet, unet, vgg, vit; or the path of a folder",
    ),
    "x" * 5000: ("File name too long", "one of: alexnet, decoder"),
}


@pytest.mark.parametrize(("name", "words"), MODELS.items(), ids=[each[:30] for each in MODELS])
def test_a_model_that_is_not_there(name, words):
    found = check(loads(f"[model]\nname = {json.dumps(name)}\n"))
    said = [str(problem) for problem in found if problem.got.startswith("model.name")]
    assert said
    assert all(each in said[0] for each in words)


@pytest.mark.parametrize(
    ("name", "words"), [("hf/lama", "no such file or folder"), ("hf/llama", "no tokenizer.json there")]
)
def test_a_tokenizer_that_is_not_there(name, words):
    with pytest.raises(JaxparError, match=words):
        read_tokenizer(name)


def test_a_run_that_is_not_there():
    with pytest.raises(JaxparError, match="it is no folder"):
        load_text_model("runs/typo", SamplingRequest())
    with pytest.raises(JaxparError, match=r"empty holds no job.toml\n"):
        load_text_model("empty", SamplingRequest())
