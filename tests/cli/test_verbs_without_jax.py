"""Verbs that trace no model import neither JAX nor what is built on it: importing it takes seconds, they take none."""

import subprocess
import sys
from pathlib import Path

import pytest

from jaxpar.cli.main import VERBS

HELP = [[], *([verb.__name__.rpartition(".")[2]] for verb in VERBS), ["measure", "gemm"], ["checkpoint", "ls"]]
GPT = "configs/gpu_gpt2_124m.toml"
VGG = str(Path(__file__).parents[1] / "partition" / "pipedream" / "vgg16.graph.txt")
PRINTED = [
    *([*verb, "--help"] for verb in HELP),
    ["--version"],
    ["train", "--print-defaults"],
    ["schedule", "--compare", "--stages", "4", "--microbatches", "8"],
    ["partition", VGG, "16@10Gb/s"],
    ["plan", GPT, "--devices", "8", "--advise", "--html", "{tmp}/plan.html", "--write", "{tmp}/planned.toml"],
]
REFUSED = [
    ["plan", GPT, "--devices", "8", "train.loss=no_loss"],
    ["plan", GPT, "--devices", "8", "model.no_key=1"],
    ["train", GPT, "train.no_key=1"],
    ["check", "no_such_job.toml"],
]
RUN = """
import sys
from jaxpar.cli.main import main
for words in {commands}:
    try:
        status = main(words)
    except SystemExit as left:
        status = left.code
    assert status == {status}, (status, words)
    heavy = sorted({{"jax", "jaxlib", "flax", "optax", "orbax"}} & sys.modules.keys())
    assert not heavy, (words, heavy)
"""


@pytest.mark.parametrize(
    ("commands", "status"), [pytest.param(PRINTED, 0, marks=pytest.mark.slow), (REFUSED, 1)], ids=["printed", "refused"]
)
def test_verbs_that_trace_no_model_import_no_jax(commands, status, tmp_path):
    told = [[word.format(tmp=tmp_path) for word in words] for words in commands]
    code = RUN.format(commands=told, status=status)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
