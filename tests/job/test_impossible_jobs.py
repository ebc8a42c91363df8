"""A job that cannot do what it says is refused by `check`: other tokens than a model knows, evaluations of nothing."""

import dataclasses
import io

import jax
import numpy as np
import pytest

import jaxpar as jp
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads
from jaxpar.models.huggingface.weights import export

JOB = """
[parallel]
data = 8
[model]
layers = 1
dim = 16
heads = 2
hidden = 32
vocab = {vocab}
seq = 8
[data]
source = "text"
path = "{text}"
seq = 8
[train]
steps = 2
global_batch = 8
[run]
dir = "{folder}"
"""
SETTINGS = {"layers": 1, "dim": 16, "heads": 2, "hidden": 32, "seq": 8}


@pytest.fixture
def text(tmp_path):
    (tmp_path / "text.txt").write_text("the quick brown fox " * 40)
    return tmp_path / "text.txt"


def llama(folder, vocab):
    """Writes a Llama with random parameters as a folder of Hugging Face's."""
    settings = jp.DecoderConfig(vocab=vocab, **SETTINGS)
    layout = jp.compose(decoder(settings), jp.Parallel(), jax.devices()[:1])
    flat = jax.tree_util.tree_leaves_with_path(layout.blueprint.init(jax.random.key(0))[0])
    export({"/".join(str(key.key) for key in keys): np.asarray(value) for keys, value in flat}, settings, folder)
    return folder


def decoder(settings):
    return lambda rngs: jp.Decoder(settings, rngs=rngs)


def job(text, vocab, *overrides):
    return loads(JOB.format(text=text, vocab=vocab, folder=text.parent / "run"), overrides)


def problems(*args):
    return [str(problem) for problem in check(job(*args))]


@pytest.mark.spread(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        pytest.param("tokenizer.json", marks=pytest.mark.slow),
        "tokenizer.model",
        pytest.param("vocab.json", marks=pytest.mark.slow),
    ],
)
def test_a_model_with_a_tokenizer_is_not_trained_on_bytes(text, name):
    folder = llama(text.parent / "my-llama", 256)
    start = f"checkpoint.start_from={folder}"
    assert not problems(text, 256, start)
    (folder / name).write_text("{}")
    (found,) = problems(text, 256, start)
    assert f"a tokenizer of its own ({name})" in found
    assert (f"data.tokenizer = '{folder}'" if name == "tokenizer.json" else "data.source = 'arrays'") in found
    with pytest.raises(JaxparError, match="a tokenizer of its own"):
        run.train(job(text, 256, start), stream=io.StringIO())
    tokens = np.random.default_rng(0).integers(0, 256, (40, 9))
    np.savez(text.parent / "a.npz", inputs=tokens[:, :-1], targets=tokens[:, 1:])
    arrays = ("data.source=arrays", f"data.path={text.parent / 'a.npz'}")
    assert not problems(text, 256, start, *arrays)


@pytest.mark.nightly
def test_a_model_of_more_tokens_than_the_text_has_is_not_trained_on_it(text):
    folder = llama(text.parent / "my-llama", 512)
    (found,) = problems(text, 512, f"checkpoint.start_from={folder}")
    assert "knows 512 tokens" in found


@pytest.mark.nightly
def test_check_compares_the_model_with_the_folder_that_it_starts_from(text):
    folder = llama(text.parent / "my-llama", 256)
    (found,) = problems(text, 256, f"checkpoint.start_from={folder}", "model.layers=2", "model.rope_base=500.0")
    assert "has layers = 2, rope_base = 500.0" in found
    assert "layers = 1, rope_base = 10000.0" in found
    assert not (text.parent / "run").exists()


def generator():
    while True:
        yield {"inputs": np.zeros((8, 8), np.int32), "targets": np.zeros((8, 8), np.int32)}


class Own:
    def batch(self, step, size):
        return next(generator())


class Evaluated(Own):
    def evaluation(self, index, size):
        return None if index else next(generator())


@pytest.mark.nightly
@pytest.mark.parametrize("key", ["train.eval_every=1", "checkpoint.keep_best=1"])
@pytest.mark.parametrize("source", [pytest.param("generator", marks=pytest.mark.slow), "Own"])
def test_an_evaluation_of_a_source_that_holds_nothing_out_is_refused(text, key, source):
    named = (f"data.source=test_impossible_jobs:{source}", "data.path=")
    asked = job(text, 256, *named, key)
    (found,) = check(replaced(asked))
    assert key.replace("=", " = ") in found.got
    assert "holds no example out" in found.got
    assert not check(replaced(job(text, 256, *named)))
    more = "data.source=test_impossible_jobs:Evaluated"
    assert not check(replaced(job(text, 256, more, "data.path=", key)))


def replaced(asked):
    """Returns the job with leave to import from this folder."""
    return dataclasses.replace(asked, allow_import=True)


@pytest.mark.parametrize("override", ["data.held_out=0.0", "data.held_out=0.001"])
def test_an_evaluation_of_text_that_holds_nothing_out_is_refused(text, override):
    asked = job(text, 256, override, "train.eval_every=1")
    with pytest.raises(JaxparError, match=r"train.eval_every = 1, and data.source = 'text' holds no example out"):
        run.train(asked, stream=io.StringIO())
    assert check(job(text, 256, "data.held_out=0.0", "checkpoint.keep_best=1"))


@pytest.mark.nightly
def test_text_is_sampled_from_a_model_of_more_tokens_than_text_has(text, capsys):
    run.train(job(text, 1024), stream=io.StringIO())
    assert main(["sample", str(text.parent / "run"), "--prompt", "the ", "--tokens", "20", "--temperature", "9"]) == 0
    out = capsys.readouterr()
    assert out.out.startswith("the ")
    assert "Traceback" not in out.err
