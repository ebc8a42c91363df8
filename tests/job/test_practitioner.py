"""A practitioner's day, offline: a Llama of Hugging Face's and 2,000 conversations come in, a tuned one goes out.

    folder, talks.jsonl ─► jaxpar train: LoRA on 2 x 2 x 2 ─► SIGTERM ─► the same command ─► export ─► transformers

Every command is that which a user types; what is compared is on the disk.
"""

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import supervised_runs
import tokenizing
from test_fine_tune import forward
from test_huggingface import LLAMA, born

from jaxpar.checkpoint import listing, reading
from jaxpar.cli.main import main
from jaxpar.job.checkpoint import _numbers, _on_one_device
from jaxpar.models.huggingface.safetensors import entries
from jaxpar.models.huggingface.weights import export, load

SETTINGS = replace(LLAMA, vocab=512, seq=128, layers=2, dim=32, heads=4, kv_heads=2, hidden=64)
ROWS, STEPS, EVERY = 2000, 36, 6
CLOCKS = ("seconds", "tokens_per_second", "input_wait_seconds")
PAIRS = ("cat sits", "dog runs", "bird sings", "fish swims", "cow eats", "mouse hides", "fox waits")
JOB = """
[mesh]
simulate = 8
[model]
name = "my-llama"
[data]
source = "jsonl"
path = "talks.jsonl"
messages = "messages"
tokenizer = "my-llama"
documents = "apart"
seq = 64
held_out = 0.05
[train]
steps = {steps}
global_batch = 16
eval_every = {every}
adapters = {{rank = 4, alpha = 8.0, paths = ["blocks/*"]}}
[optimizer]
learning_rate = 0.02
[metrics]
evaluate = ["perplexity"]
[parallel]
data = 2
fsdp = 2
tensor = 2
"""


@pytest.fixture(scope="module")
def bench(tmp_path_factory):
    """A working directory: the model's folder, the conversations, the job."""
    here = tmp_path_factory.mktemp("day")
    parts = {path: np.ones_like(value) if "norm" in path else value / 2 for path, value in born(SETTINGS).items()}
    export(parts, SETTINGS, here / "my-llama")
    tokenizing.llama3(here / "my-llama")
    rng = np.random.default_rng(0)
    with (here / "talks.jsonl").open("w") as out:
        for row in range(ROWS):
            who, does = PAIRS[rng.integers(len(PAIRS))].split()
            talk = [
                {"role": "user", "content": f"question {row}: what does the {who} do?"},
                {"role": "assistant", "content": f"The {who} {does}."},
            ]
            out.write(json.dumps({"messages": talk}) + "\n")
    (here / "tune.toml").write_text(JOB.format(steps=STEPS, every=EVERY))
    return here


def begin(folder: Path, run: str):
    words = ["train", "tune.toml", f"run.dir={run}", f"data.path={folder / 'talks.jsonl'}"]
    return subprocess.Popen(
        [sys.executable, "-m", "jaxpar", *words], cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        text=True, env=os.environ | {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2])])},
    )  # fmt: skip


def rows(run: Path) -> list[dict]:
    file = run / "metrics.jsonl"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def of_numbers(run: Path) -> list[dict]:
    """Returns the rows of a run without what clocks say."""
    return [{key: value for key, value in row.items() if key not in CLOCKS} for row in rows(run)]


def saved(run: Path) -> dict[str, np.ndarray]:
    """Returns path to values of the last checkpoint's arrays; keys by their bits."""
    path = listing.find(run, None).resolve()
    found = reading.read_manifest(path)
    return {
        name: _numbers(reading.read_arrays(path, found, _on_one_device({name: each}))[name])
        for name, each in found.arrays.items()
    }


@pytest.mark.nightly
def test_a_llama_is_tuned_stopped_continued_exported_and_read_by_transformers(bench):
    whole, stopped = begin(bench, "whole"), begin(bench, "parts")
    assert supervised_runs.wait_until(lambda: len(rows(bench / "parts")) >= EVERY + 2, seconds=60)
    stopped.send_signal(signal.SIGTERM)
    said = stopped.communicate(timeout=60)[0]
    assert stopped.returncode == 128 + signal.SIGTERM, said
    at = len(rows(bench / "parts"))
    assert EVERY < at < STEPS, said
    for process in (whole, begin(bench, "parts")):
        said = process.communicate(timeout=120)[0]
        assert process.returncode == 0, said
    assert f"on from step {at}" in said

    assert of_numbers(bench / "parts") == of_numbers(bench / "whole")
    arrays, again = saved(bench / "whole"), saved(bench / "parts")
    assert {name: each.tobytes() for name, each in again.items()} == {k: v.tobytes() for k, v in arrays.items()}
    scores = [row["eval_perplexity"] for row in rows(bench / "whole") if "eval_perplexity" in row]
    assert len(scores) == STEPS // EVERY
    assert scores[-1] <= 0.8 * scores[0], scores

    base = {path: tensor[...] for path, tensor in load(bench / "my-llama").params.items()}
    assert all(arrays[f"params/{path}"].tobytes() == np.asarray(value).tobytes() for path, value in base.items())
    assert any("adapters" in name for name in arrays)
    moments = [name for name in arrays if "/mu/" in name]
    assert moments
    assert all("adapters" in name for name in moments)

    tuned = bench / "tuned"
    assert main(["checkpoint", "export", str(bench / "parts"), "--format", "safetensors", "--to", str(tuned)]) == 0
    before, after = entries(bench / "my-llama" / "model.safetensors"), entries(tuned / "model.safetensors")
    same = {name for name in before if before[name].view().tobytes() == after[name].view().tobytes()}
    assert same == {name for name in before if "norm" in name or name.split(".")[-2] in ("embed_tokens", "lm_head")}
    read_by_transformers(bench, tuned)


def read_by_transformers(bench: Path, tuned: Path) -> None:
    """Checks that transformers computes and writes what jaxpar does, of the folder alone."""
    torch = pytest.importorskip("torch", reason="of the extra huggingface-tests, on Python 3.11")
    transformers = pytest.importorskip("transformers", reason="of the extra huggingface-tests, on Python 3.11")
    theirs, info = transformers.AutoModelForCausalLM.from_pretrained(tuned, output_loading_info=True)
    assert not any(info.values()), info
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(tuned), forward(load(tuned))
    asked = [{"role": "user", "content": "question 7: what does the fox do?"}]
    text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
    prompt = tokenizer.apply_chat_template(asked, add_generation_prompt=True)
    wanted = [*prompt]
    with torch.no_grad():
        for _ in range(50):
            wanted.append(int(theirs.eval()(torch.tensor([wanted])).logits[0, -1].argmax()))
        want = theirs(torch.tensor([wanted])).logits[0].numpy()
    window = np.zeros((1, SETTINGS.seq), np.int32)
    window[0, : len(wanted)] = wanted
    np.testing.assert_allclose(ours(window)[0, : len(wanted)], want, rtol=1e-5, atol=1e-5)
    assert greedy(ours, prompt, 50) == wanted

    (bench / "prompts.jsonl").write_text(json.dumps({"prompt": text.removeprefix(tokenizer.bos_token)}) + "\n")
    files = ["--prompts", str(bench / "prompts.jsonl"), "--out", str(bench / "answers.jsonl")]
    assert main(["sample", str(bench / "parts"), *files, "--temperature", "0", "--stop", "<|eot|>"]) == 0
    (answer,) = (json.loads(line)["text"] for line in (bench / "answers.jsonl").read_text().splitlines())
    assert answer == tokenizer.decode(wanted[len(prompt) :]).partition("<|eot|>")[0]
    assert answer in [f"The {pair}." for pair in PAIRS]


def greedy(logits, prompt: list[int], count: int) -> list[int]:
    """Returns a prompt and the likeliest tokens after it, each by the logits of all before it."""
    tokens = [*prompt]
    for _ in range(count):
        window = np.zeros((1, SETTINGS.seq), np.int32)
        window[0, : len(tokens)] = tokens
        tokens.append(int(np.argmax(logits(window)[0, len(tokens) - 1])))
    return tokens
