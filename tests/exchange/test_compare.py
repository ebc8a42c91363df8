"""`jaxpar exchange compare`: several ways to agree, trained on one job, on one page."""

import json
import re
from pathlib import Path

import numpy as np
import pytest

from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.exchange.clock.methods import Stale
from jaxpar.html.charts import ticks
from jaxpar.job.compare.parse_methods import fit_batch, parse
from jaxpar.job.file.parse import loads

JOB = """
[mesh]
simulate = 8
[parallel]
data = 4
fsdp = 2
[parallel.exchange]
name = "local"
every = 3
optimizer = "averaged"
[model]
name = "mlp"
layers = 1
dim = 16
hidden = 16
inputs = 8
classes = 4
[data]
source = "arrays"
path = "rows.npz"
held_out = 0.2
[optimizer]
learning_rate = 1e-2
decay = "constant"
[train]
loss = "classify"
steps = 6
global_batch = 24
eval_batches = 2
"""


def rows_of_the_job():
    rng = np.random.default_rng(0)
    np.savez("rows.npz", inputs=rng.normal(size=(120, 8)).astype(np.float32), labels=rng.integers(0, 4, 120))


def test_methods_are_written_with_their_one_number():
    job = loads(JOB)
    found = {
        each.name: each.algorithm for each in parse("sync, local, local:7,topk:0.05,qsgd:4,powersgd:2,ssp:3,async", job)
    }
    assert (found["local"].every, found["local"].optimizer) == (3, "averaged")  # as the job says
    assert (found["local:7"].every, found["local:7"].optimizer) == (7, "averaged")
    assert (found["topk:0.05"].share, found["qsgd:4"].bits, found["powersgd:2"].rank) == (0.05, 4, 2)
    assert found["ssp:3"] == Stale(bound=3)
    assert found["async"] == Stale(name="async")
    assert found["sync"].name == "all_reduce"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("snyc", "method 'snyc'"),
        ("", "method ''"),
        ("local:often", "method local:often"),
        ("local:0", "every = 0"),
        ("ensemble:3", "method ensemble:3"),
        ("ssp", "method ssp"),
        ("ssp:-1", "bound = -1"),
        ("ssp:few", "method ssp:few"),
        ("async:2", "method async:2"),
        ("downpour:0", "shards = 0"),
        ("sync,sync", "method sync twice"),
    ],
)
def test_a_method_that_there_is_not_is_refused(text, said):
    with pytest.raises(JaxparError) as caught:
        parse(text, loads(JOB))
    assert said in str(caught.value)


@pytest.mark.full
def test_methods_are_compared_on_one_page(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    rows_of_the_job()
    words = [
        "--methods",
        "sync,local:2,ssp:0,async,backup:1,async-easgd:2",
        "--json",
        "found.json",
        "--html",
        "page.html",
    ]
    assert main(["exchange", "compare", "job.toml", *words]) == 0
    said, page = capsys.readouterr().out, Path("page.html").read_text()
    curves = {each["method"]: each for each in json.loads(Path("found.json").read_text())["curves"]}
    assert {name: each["simulated"] for name, each in curves.items()} == {
        "sync": False, "local:2": False, "ssp:0": True, "async": True, "backup:1": True, "async-easgd:2": True,
    }  # fmt: skip
    np.testing.assert_allclose(curves["ssp:0"]["loss"], curves["sync"]["loss"], rtol=1e-4)
    assert curves["ssp:0"]["eval_loss"] == pytest.approx(curves["sync"]["eval_loss"], rel=1e-4)
    assert {each["samples"][-1] for each in curves.values()} == {144}
    # every other step the parameters, and both of Adam's averages with them, as the job says
    assert curves["local:2"]["bytes"][-1] == pytest.approx(curves["sync"]["bytes"][-1] * 3 / 2)
    assert curves["async"]["staleness"] > 1
    assert curves["async"]["seconds"][-1] < curves["sync"]["seconds"][-1]
    # each of 4 workers fetches the center and returns its part every other step: the parameters once each way
    assert curves["async-easgd:2"]["bytes"][-1] == pytest.approx(curves["async"]["bytes"][-1] / 2, rel=0.2)
    assert curves["backup:1"]["seconds"][-1] < curves["sync"]["seconds"][-1]
    assert re.search(r"^async +simulated +\d\.\d{4} +144 ", said, re.MULTILINE)
    assert page.count('class="jx-field"') == 3
    assert "async (simulated)" in page
    assert not re.search(r"https?://|<script", page)


def test_nothing_is_trained_where_a_method_cannot_be(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    Path("job.toml").write_text(JOB)
    rows_of_the_job()
    assert main(["exchange", "compare", "job.toml", "--methods", "sync,backup:1", "train.global_batch=16"]) == 1
    said = capsys.readouterr()
    assert "train.global_batch = 16 with backup:1 (6)" in said.err  # three shares, for two devices each
    assert "by 24 for all that are compared" in said.err
    assert said.err.count("train.global_batch = 24") == 1
    assert "loss" not in said.out


@pytest.mark.parametrize(
    ("batch", "fix"), [("12", "24"), ("25", "48"), ("24", None), ("24 train.accumulate=5", "120")]
)  # 12 is four shares of three, which two devices do not divide
def test_the_fix_is_a_batch_that_all_methods_divide(batch, fix):
    job = loads(JOB, [f"train.global_batch={batch.split()[0]}", *batch.split()[1:]])
    fitting, problems = fit_batch(job, parse("sync,backup:1,async,local:2", job))
    assert [problem.fix for problem in problems] == [f"train.global_batch = {fix}"] * bool(fix)
    assert fit_batch(fitting, parse("sync,backup:1,async,local:2", job)) == (fitting, [])


def test_ticks_are_round_and_few():
    for low, high in ((0, 1), (0, 7.3e6), (-0.02, 0.3), (2.31, 2.32)):
        found = ticks(low, high)
        assert 2 <= len(found) <= 7
        assert low <= min(found) <= max(found) <= high * (1 + 1e-9)
