"""`jaxpar partition`: published plans from the command line, and one clear error for each wrong word."""

import json
import re
import subprocess
import sys
from math import inf
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxpar.cli import partition as verb
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.file.parse import load as load_job
from jaxpar.partition.objective import parse
from jaxpar.units import parse_rate

DATA = Path(__file__).parents[1] / "partition" / "pipedream"
VGG, GNMT = (str(DATA / f"{name}.graph.txt") for name in ("vgg16", "gnmt_large"))


@pytest.mark.parametrize(
    ("profile", "words", "plan", "speedup"),
    [
        (VGG, ["16@10Gb/s"], "15-1", 1.55),
        (VGG, ["16@10Gb/s", "--overlap", "1"], "15-1", 1.17),
        (VGG, ["16@1.25GB/s", "--overlap", "1", "--minibatch", "0.5"], "15-1", 2.35),
        (VGG, ["8@10Gb/s"], "7-1", 1.51),
        (VGG, ["4@12GB/s", "4@10Gb/s"], "3(4)-1(4)", 2.85),
        (VGG, ["4@12GB/s", "4@10Gb/s", "--overlap", "1"], "3(4)-1(4)", 3.01),
        (VGG, ["4@1GB", "--coefficient", "released", "--overlap", "0"], "3-1", 2.84),
        (VGG, ["4@1GB/s"], "3-1", 1.42),
        (VGG, ["4@1GB/s", "--overlap", "1"], "4", 1.00),
        (VGG, ["4@1GB/s", "--overlap", "1", "--margin", "0"], "3-1", 1.01),
        (GNMT, ["4@12GB/s", "--overlap", "0"], "1-1-1-1", 1.20),
    ],
)
def test_published_plans(profile, words, plan, speedup, tmp_path, capsys):
    out = tmp_path / "plan.json"
    assert main(["partition", profile, *words, "--json", str(out)]) == 0
    found = json.loads(out.read_text())
    assert (found["name"], found["how"]) == (plan, "modelled")
    assert found["speedup"] == pytest.approx(speedup, abs=0.005)
    assert found["seconds"] == max(stage["takes"] for stage in found["stages"])
    assert f"{plan} on " in capsys.readouterr().out


def test_it_says_what_limits_each_stage(capsys):
    assert main(["partition", VGG, "4@12GB/s", "4@10Gb/s"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "41 layers, 527.8 MiB of parameters, 673 ms a minibatch on one device"
    assert lines[2].endswith("limited by")
    assert [line.split("  ")[-1].strip() for line in lines[3:5]] == ["computes", "all-reduces over level 1"]
    assert main(["partition", VGG, "16@10Gb/s", "--coefficient", "shared", "--margin", "0"]) == 0
    assert capsys.readouterr().out.splitlines()[3].endswith("sends")


def test_what_its_help_shows_is_what_it_prints(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)  # where the profile is that of the wheel
    command = verb.EXAMPLE.splitlines()[0].split()
    assert main(command[2:]) == 0
    for line in capsys.readouterr().out.splitlines():
        assert f"  {line}\n" in verb.EXAMPLE


def test_a_plan_within_a_devices_memory(capsys, tmp_path):
    out = tmp_path / "plan.json"
    assert main(["partition", VGG, "16@10Gb/s", "--memory", "20GiB", "--json", str(out)]) == 0
    assert "memory: 15-1 does not fit" in capsys.readouterr().out
    assert all(stage["memory"] <= 20 * 2**30 for stage in json.loads(out.read_text())["stages"])
    assert json.loads(out.read_text())["objective"]["memory"] == 20 * 2**30


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["nothing.txt", "4@1GB/s"], "nothing.txt"),
        ([str(Path(__file__)), "4@1GB/s"], "a line is a node, its layer and its costs"),
        ([VGG, "16"], "level '16'"),
        ([VGG, "a@1GB/s"], "level 'a@1GB/s'"),
        ([VGG, "16@ten"], "'ten' is no bandwidth"),
        ([VGG, "16@10GB/h"], "'10GB/h' is no bandwidth"),
        ([VGG, "0@1GB/s"], "level 1 has size 0"),
        ([VGG, "4@12GB/s", "4@0Gb/s"], "level 2 has bandwidth 0.0"),
        ([VGG, "4@12GB/s", "parallel.pipe=4"], "level 'parallel.pipe=4'"),
        ([VGG, "4000@1GB/s"], "4000 parts of level 1"),
        ([VGG, "16@10Mb/s"], "adding parts to the outermost level must make a minibatch faster"),
        ([VGG, "4@1GB/s", "--memory", "1GiB"], "no plan fits"),
        ([VGG, "4@1GB/s", "--memory", "much"], "'much' is no size"),
        ([VGG, "4@1GB/s", "--coefficient", "rign"], "did you mean 'ring'?"),
        ([VGG, "4@1GB/s", "--overlap", "2"], "overlap = 2.0"),
        ([VGG, "4@1GB/s", "--margin", "nan"], "margin = nan"),
        ([VGG, "4@1GB/s", "--minibatch", "0"], "0.0 times the minibatch"),
        ([VGG, "4@1GB/s", "--minibatch", "inf"], "inf times the minibatch"),
    ],
)
def test_what_is_wrong_is_one_error(words, said, capsys):
    assert main(["partition", *words]) == 1
    error = capsys.readouterr().err
    assert said in error
    assert error.count("rule:") == 1


@pytest.mark.parametrize(
    ("text", "rate"),
    [("10Gb/s", 1.25e9), ("10 Gbit/s", 1.25e9), ("10Gbps", 1.25e9), ("8b/s", 1.0), ("12GB/s", 12e9), ("1GiB", 2.0**30)],
)
def test_bandwidths_in_bytes_and_in_bits(text, rate):
    assert parse_rate(text) == rate


@settings(max_examples=50, deadline=None)
@given(st.lists(st.text(max_size=12), min_size=1, max_size=3))
def test_any_words_are_levels_or_refused(words):
    try:
        found = parse(words)
    except JaxparError:
        return
    assert all(0 <= rate < inf for _, rate in found)


# A job: its model is traced, and the job that is written trains.

JOB = """
[mesh]
simulate = 4
[model]
name = "vit"
patch = 4
layers = 2
dim = 64
heads = 4
[data]
source = "digits"
[train]
loss = "classify"
steps = 2
global_batch = 24
"""


@pytest.mark.slow
def test_a_job_is_partitioned_and_what_is_written_trains(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    assert main(["partition", "job.toml", "4@10Gb/s", "--write", "cut.toml", "--json", "plan.json"]) == 0
    printed = capsys.readouterr().out
    assert "examples a minibatch; seconds by a roofline of NVIDIA H100 SXM" in printed
    plan, pipeline = json.loads(Path("plan.json").read_text()), load_job("cut.toml").parallel.pipeline
    replicas = [stage["replicas"] for stage in plan["stages"]]
    assert len(replicas) > 1
    assert sum(replicas) == 4
    assert pipeline.stages == "found"  # jp.ViT gives jp.pipelined a stack, and no pieces
    assert list(pipeline.replicas or [1] * len(replicas)) == replicas
    run = subprocess.run([sys.executable, "-m", "jaxpar", "train", "cut.toml"], capture_output=True, text=True)
    assert run.returncode == 0, run.stderr
    assert "pieces, chosen by a roofline" in run.stdout
    assert re.search(r"with \d+ microbatches, devices wait \d+% of the time in 1f1b, and each holds ", printed)


def test_no_job_is_written_for_a_profile(tmp_path, capsys):
    assert main(["partition", VGG, "4@10Gb/s", "--write", str(tmp_path / "cut.toml")]) == 1
    assert "a profile does not say which model it is of" in capsys.readouterr().err
