"""A stranger's afternoon: folders of two families and chat in Parquet; tuned, killed, resumed, evaluated, exported."""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from tokenizing import llama3

from jaxpar.models.decoder import Decoder
from jaxpar.models.huggingface.weights import export, load
from jaxpar.models.settings.decoder import DecoderConfig

pytestmark = pytest.mark.slow
SHAPE = DecoderConfig(vocab=500, seq=128, layers=4, dim=32, heads=4, kv_heads=2, hidden=48, norm_eps=1e-6)
FAMILIES = {
    "qwen2": replace(SHAPE, biases=("qkv",), tied=True),
    "mistral": replace(SHAPE, windows=(16,), head_dim=16),
}
PROMPT = "Which number comes after 7?"
JOB = """
model.name = "{folder}"
[train]
steps = 60
global_batch = 8
eval_every = 20
adapters = {{rank = 4, alpha = 8.0, paths = ["blocks/attention/*", "blocks/mlp/*"]}}
[data]
source = "parquet"
path = "talks.parquet"
messages = "messages"
tokenizer = "{folder}"
seq = 64
[optimizer]
learning_rate = 0.01
[mesh]
simulate = 8
[parallel]
data = 2
fsdp = 2
tensor = 2
[checkpoint]
every = 10
"""


def jaxpar(*words, **options):
    return subprocess.Popen(
        [sys.executable, "-m", "jaxpar", *words], text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, **options
    )


def output_of(*words, **options):
    process = jaxpar(*words, **options)
    text, _ = process.communicate(timeout=300)
    assert process.returncode == 0, text
    return text


def write_talks(path):
    pa = pytest.importorskip("pyarrow", reason="without pyarrow no Parquet is written")
    from pyarrow import parquet

    talks = [
        [
            {"role": "user", "content": f"Which number comes after {i % 50}?"},
            {"role": "assistant", "content": f"The number {i % 50 + 1}."},
        ]
        for i in range(400)
    ]
    parquet.write_table(pa.table({"messages": talks}), path)


def perplexity(subject, *overrides, cwd, env):
    output_of("evaluate", subject, *overrides, "--json", "numbers.json", cwd=cwd, env=env)
    (score,) = json.loads((cwd / "numbers.json").read_text())["scores"]
    return score["metrics"]["perplexity"]


@pytest.mark.spread(1)
@pytest.mark.parametrize("family", FAMILIES)
def test_a_folder_is_tuned_stopped_resumed_evaluated_and_exported(family, tmp_path):
    settings = FAMILIES[family]
    with nnx.use_eager_sharding(False):
        params = nnx.state(Decoder(settings, rngs=nnx.Rngs(0)), nnx.Param)
    flat = {"/".join(map(str, path)): np.asarray(leaf[...]) for path, leaf in nnx.to_flat_state(params)}
    llama3(tmp_path / "base")
    small = {file.name: file.read_bytes() for file in (tmp_path / "base").iterdir()}
    (tmp_path / "folder").mkdir()
    export(flat, settings, tmp_path / "folder")
    for name, content in small.items():
        (tmp_path / "folder" / name).write_bytes(content)
    write_talks(tmp_path / "talks.parquet")
    (tmp_path / "tune.toml").write_text(JOB.format(folder="folder"))
    here = {"cwd": tmp_path, "env": os.environ | {"JAX_PLATFORMS": "cpu"}}

    data = ["data.source=parquet", "data.path=talks.parquet", "data.messages=messages", "data.seq=64"]
    before = perplexity("folder", *data, **here)

    process = jaxpar("train", "tune.toml", **here)
    lines = []
    for line in process.stdout:
        lines.append(line)
        if line.startswith("step 2") or " 2" in line[:9]:
            process.send_signal(signal.SIGTERM)
            break
    rest, _ = process.communicate(timeout=300)
    assert "saved" in "".join(lines) + rest
    resumed = output_of("train", "tune.toml", **here)
    assert "on from step" in resumed
    after = perplexity("runs/tune", *data, **here)
    assert after < before / 4

    output_of("checkpoint", "export", "runs/tune", "--format", "safetensors", "--to", "tuned", **here)
    tuned = load(tmp_path / "tuned")
    assert tuned.kind == family
    (tmp_path / "prompts.jsonl").write_text(json.dumps({"prompt": PROMPT}) + "\n")
    output_of("sample", "runs/tune", "--prompts", "prompts.jsonl", "--out", "answers.jsonl", "--temperature", "0",
         "--tokens", "50", **here)  # fmt: skip
    (answer,) = (json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines())
    torch = pytest.importorskip("torch", reason="without torch transformers does not answer")
    transformers = pytest.importorskip("transformers", reason="without transformers nothing answers")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "tuned")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "tuned").eval()
    prompt = torch.tensor([tokenizer(PROMPT)["input_ids"]])
    with torch.no_grad():
        got = theirs(prompt).logits.numpy()
        greedy = theirs.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=50, do_sample=False)
    np.testing.assert_allclose(got, logits(tuned, jnp.asarray(prompt.numpy())), rtol=1e-5, atol=1e-5)
    new = tokenizer.decode(greedy[0, prompt.shape[1] :], skip_special_tokens=True)
    assert (answer["text"].strip(), bool(new.strip())) == (new.strip(), True)


def logits(model, tokens):
    with nnx.use_eager_sharding(False):
        graph, state = nnx.split(nnx.eval_shape(lambda: Decoder(model.settings, rngs=nnx.Rngs(0))))
    flat = [(path, leaf.replace(jnp.asarray(model.params["/".join(path)][...])))
            for path, leaf in nnx.to_flat_state(state)]  # fmt: skip
    return np.asarray(nnx.merge(graph, nnx.from_flat_state(flat))(tokens))
