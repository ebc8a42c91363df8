"""Samples stop at the token that ended documents when the run was trained, and what is exported names it too."""

import io
import json
from pathlib import Path

import pytest

from jaxpar.cli.main import main
from jaxpar.data.tokenizers.tokenizer_facts import read_tokenizer
from jaxpar.job import run
from jaxpar.job.file.parse import load
from jaxpar.job.sample import SamplingRequest, load_text_model, sample

JOB = """
[parallel]
data = 8
[model]
layers = 1
dim = 32
heads = 2
hidden = 64
[data]
source = "{source}"
path = "{path}"
tokenizer = "{tokenizer}"
documents = "alone"
seq = 16
held_out = 0.0
{more}
[optimizer]
learning_rate = 0.03
[train]
steps = {steps}
global_batch = 8
[run]
dir = "{folder}"
"""
CHATML = (
    "{% for message in messages %}<|start|>{{ message['role'] }}\n{{ message['content'] }}<|eot|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|start|>assistant\n{% endif %}"
)


def trained(folder, tokenizer="bytes", *, steps=1, more="", rows=None, source="jsonl"):
    """Returns the folder of a run on rows of "hello world", and its job."""
    rows = rows or [{"text": "hello world"}] * 64
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    names = {"path": folder / "rows.jsonl", "tokenizer": tokenizer, "folder": folder / "run", "source": source}
    (folder / "job.toml").write_text(JOB.format(steps=steps, more=more, **names))
    job = load(folder / "job.toml")
    run.train(job, stream=io.StringIO())
    return folder / "run", job


def ends_of(folder):
    return [*load_text_model(folder, SamplingRequest()).ends]


def exported(folder, to):
    assert main(["checkpoint", "export", str(folder), "--format", "safetensors", "--to", str(to)]) == 0
    return json.loads((to / "config.json").read_text())


@pytest.mark.nightly
def test_a_model_of_bytes_stops_where_its_documents_end(tmp_path):
    folder, _ = trained(tmp_path, steps=40)
    (answer,) = sample(folder, ["hello"], SamplingRequest(tokens=10)).answers
    assert answer.text == " world"
    assert answer.tokens == len(b" world\0")
    assert exported(folder, tmp_path / "to")["eos_token_id"] == 0


@pytest.mark.nightly
def test_a_model_of_bpe_ends_at_its_own_end(tmp_path):
    pytest.importorskip("tokenizers")
    folder, _ = trained(tmp_path, "bpe", more="vocab = 260")
    model = load_text_model(folder, SamplingRequest())
    assert model.ends == (0,)
    assert model.text.bpe.id_to_token(0) == "<end>"
    assert exported(folder, tmp_path / "to")["eos_token_id"] == 0


@pytest.fixture
def tokenizing():
    pytest.importorskip("tokenizers")
    import tokenizing

    return tokenizing


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("end", "token"), [("", "<|end_of_text|>"), pytest.param("<|eot|>", "<|eot|>", marks=pytest.mark.full)]
)
def test_a_saved_tokenizer_ends_at_its_eos_or_at_data_end(end, token, tmp_path, tokenizing):
    kept = tokenizing.llama3(tmp_path / "tokenizer")
    folder, _ = trained(tmp_path, kept, more=f'end = "{end}"')
    want = read_tokenizer(kept).ids[token]
    assert ends_of(folder) == [want]
    config = exported(folder, tmp_path / "to")
    assert config["eos_token_id"] == want
    assert config["bos_token_id"] == read_tokenizer(kept).ids["<|begin|>"]


@pytest.mark.slow
def test_a_run_of_messages_also_ends_where_the_template_ends_an_answer(tmp_path, tokenizing):
    pytest.importorskip("jinja2")
    kept = tokenizing.llama3(tmp_path / "tokenizer", CHATML)
    said = [{"role": "user", "content": "hello"}, {"role": "assistant", "content": "world"}]
    folder, _ = trained(tmp_path, kept, more='messages = "messages"', rows=[{"messages": said}] * 64)
    want = [read_tokenizer(kept).ids[each] for each in ("<|end_of_text|>", "<|eot|>")]
    assert ends_of(folder) == want
    assert exported(folder, tmp_path / "to")["eos_token_id"] == want
    transformers = pytest.importorskip("transformers")
    assert transformers.GenerationConfig.from_model_config(
        transformers.AutoConfig.from_pretrained(tmp_path / "to")
    ).eos_token_id == want  # fmt: skip


@pytest.mark.parametrize(
    "generation", [pytest.param(True, marks=pytest.mark.slow), pytest.param(False, marks=pytest.mark.full)]
)
def test_data_end_is_added_to_the_ends_of_the_folder_that_a_run_began_with(generation, tmp_path, tokenizing):
    kept = tokenizing.llama3(tmp_path / "tokenizer")
    first, _ = trained(tmp_path, kept)
    begun, ids = tmp_path / "begun", read_tokenizer(kept).ids
    exported(first, begun)
    if generation:
        (begun / "generation_config.json").write_text(json.dumps({"eos_token_id": [ids["<|end_of_text|>"]]}))
    (tmp_path / "second").mkdir()
    folder, _ = trained(tmp_path / "second", begun, more=f'end = "<|eot|>"\n[checkpoint]\nstart_from = "{begun}"')
    want = [ids["<|eot|>"], ids["<|end_of_text|>"]]
    assert ends_of(folder) == want
    assert exported(folder, tmp_path / "to")["eos_token_id"] == want
    if generation:
        assert json.loads(Path(tmp_path / "to" / "generation_config.json").read_text())["eos_token_id"] == want
