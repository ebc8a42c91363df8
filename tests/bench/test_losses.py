"""Benches of losses on real data: what is trained, kept, and held to a bound. Here losses are made up."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from bench import batches, exchanges
from bench.command import main as bench
from jaxpar.job.file.parse import load

QUICKSTART, DIGITS = "configs/quickstart.toml", "configs/digits.toml"


@pytest.fixture
def trained(monkeypatch):
    """What was asked to be trained, as (job, method); losses are made up."""
    asked = []

    def train(job, method, times, link):
        asked.append((job, method))
        worse = {"sync": 1.0, "diloco": 1.01, "topk": 1.03, "sign without feedback": 1.04}.get(method.name, 1.0)
        loss = worse * (1 + job.train.seed) * (1 if job.optimizer.learning_rate > 2e-3 else job.train.global_batch)
        return SimpleNamespace(eval_loss=loss, bytes=np.array([8.0, 16.0]), loss=np.ones(2))

    monkeypatch.setenv("JAXPAR_NO_HUGE_PAGES", "1")  # which would start the process anew
    for module in (exchanges, batches):
        monkeypatch.setattr(module, "train", train)
    return asked


@pytest.mark.nightly
def test_a_method_is_held_to_the_loss_of_an_all_reduce_and_a_stopped_bench_goes_on(trained, tmp_path, capsys):
    out, found = str(tmp_path / "rows.jsonl"), tmp_path / "found.json"
    words = [QUICKSTART, "--only", "diloco", "--only", "topk", "--only", "sign without feedback"]
    assert bench("exchanges", [*words, "--out", out, "--seeds", "1"]) == 1
    assert [method.name for _, method in trained] == ["sync", "diloco", "topk", "sign without feedback"]
    assert bench("exchanges", [*words, "--out", out, "--seeds", "2", "--json", str(found)]) == 1
    assert [job.train.seed for job, _ in trained] == [0] * 4 + [1] * 4
    table = json.loads(found.read_text())["table"]
    assert {name: line["holds"] for name, line in table.items()} == {
        "sync": True, "diloco": True, "topk": False, "sign without feedback": False,
    }  # fmt: skip
    assert table["topk"]["ratios"] == pytest.approx([1.03, 1.03])
    assert table["topk"]["eval_loss"] == pytest.approx(1.545)
    bench("exchanges", [QUICKSTART, "train.steps=7", "--only", "diloco", "--out", out, "--seeds", "1"])
    assert [job.train.steps for job, _ in trained[8:]] == [7, 7]  # of another job nothing was kept
    assert bench("exchanges", [QUICKSTART, "--only", "topkk"]) == 1
    assert "--only 'topkk'" in capsys.readouterr().err


def test_rows_of_a_bench_that_was_killed_while_it_wrote_are_refused_with_a_way_out(trained, tmp_path, capsys):
    out = tmp_path / "rows.jsonl"
    out.write_text('{"model": "a", "loss": 1.0}\n{"model": "a", "lo')
    assert bench("exchanges", [QUICKSTART, "--only", "diloco", "--out", str(out)]) == 1
    said = capsys.readouterr().err
    assert str(out) in said
    assert "delete the line that is not whole" in said
    assert not trained


def test_larger_batches_see_as_many_examples_with_the_rate_of_their_way():
    own = load(DIGITS)
    for way, rate in (("one rate", 2e-3), ("linear", 16e-3), ("sqrt", 2e-3 * 8**0.5)):
        job = batches.with_batch(own, way, 8)
        assert job.train.global_batch * job.train.steps == own.train.global_batch * own.train.steps
        assert job.optimizer.learning_rate == pytest.approx(rate)
        assert (job.optimizer.warmup, job.optimizer.reference_batch) == (7, 0)  # 50 steps of 64 examples


def test_a_knee_is_seen_where_one_rate_is_worse_and_linear_is_not(trained, tmp_path, capsys):
    found = tmp_path / "found.json"
    assert bench("batches", [DIGITS, "--seeds", "1", "--json", str(found)]) == 0
    said = capsys.readouterr().out
    assert "one rate at 8 x the batch at least 1.5: holds" in said
    assert "linear up to there at most 1.2: holds" in said
    assert bench("batches", [DIGITS, "optimizer.reference_batch=64"]) == 1
    assert "optimizer.reference_batch = 64" in capsys.readouterr().err
