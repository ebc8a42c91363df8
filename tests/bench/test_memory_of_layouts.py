"""The planner's peak memory beside compiled programs, of layouts that nobody chose."""

import json
from pathlib import Path

import pytest

from bench.command import main as bench
from bench.memory import kinds, shown, summary
from jaxpar.mesh.target import missing_plugin
from jaxpar.plan.candidate import Candidate

JOB = str(Path(__file__).parents[2] / "configs/gpu_llama_8b_fsdp8.toml")
SMALL = [
    "model.layers=16", "model.dim=1024", "model.heads=16", "model.hidden=2816", "model.vocab=32768", "data.vocab=32768",
    "data.seq=2048", "train.global_batch=64",
]  # fmt: skip


def test_errors_are_of_all_and_of_each_kind():
    rows = [
        {"predicted": 105.0, "bytes": 100, "kinds": ["one stage"]},
        {"predicted": 80.0, "bytes": 100, "kinds": ["pipeline", "tensor"]},
        {"predicted": 1.0, "bytes": None, "kinds": ["pipeline"]},
    ]
    found = summary(rows)
    assert {name: each["layouts"] for name, each in found.items()} == {
        "all": 2, "one stage": 1, "pipeline": 1, "tensor": 1,
    }  # fmt: skip
    assert found["all"]["mean"] == pytest.approx(0.125)
    assert found["all"]["worst"] == pytest.approx(0.2)
    assert "2 layouts: mean 12.5%" in shown(found["all"])
    assert kinds(Candidate(pipe=2, chunks=2, schedule="interleaved_phased", tensor=2)) == [
        "interleaved", "no fsdp", "remat none", "tensor",
    ]  # fmt: skip


@pytest.mark.full
@pytest.mark.skipif(missing_plugin() is not None, reason=f"compiling for absent GPUs: {missing_plugin()}")
def test_the_bench_compares_peaks_and_goes_on_after_what_it_has(tmp_path, capsys, monkeypatch):
    out = tmp_path / "peaks.jsonl"
    words = [JOB, *SMALL, "--devices", "8", "--count", "2", "--seed", "1", "--out", str(out)]
    status = bench("memory", words)
    said = capsys.readouterr().out
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert len(rows) == 2
    assert "seed 1" in said
    monkeypatch.setattr("bench.memory.compiled", None)  # not called again
    assert bench("memory", words) == status
    assert capsys.readouterr().out == said
