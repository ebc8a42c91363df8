"""Tables of published runs: what contradicts itself is refused by its line, and every run is judged."""

import csv
import io
import json

import pytest

from bench.command import main as bench
from bench.published.judged import Judged, grouped, judge, judge_all, score
from bench.published.page import place, write
from bench.published.read import load
from jaxpar.errors import JaxparError
from jaxpar.plan.time import StepTime
from jaxpar.plan.validation import rank_correlation


@pytest.fixture(scope="module")
def package():
    return load()


def table(tmp_path, *changes, columns=None):
    """A file of the package's first run, once for each mapping of changed cells."""
    row = load()[0].row
    file, out = tmp_path / "runs.csv", io.StringIO()
    writer = csv.DictWriter(out, columns or [*row], extrasaction="ignore")
    writer.writeheader()
    writer.writerows({**row, **change} for change in changes)
    file.write_text(out.getvalue())
    return file


def test_every_run_of_the_package_fills_its_machine_and_has_a_source(package):
    assert len(package) == 120
    for run in package:
        assert run.candidate.devices == int(run.row["gpus"])
        assert run.source
        assert 0.2 < run.mfu(run.seconds) < 0.7


def test_what_is_wrong_in_a_table_is_refused_by_line_all_at_once(tmp_path):
    """The lines of a file are counted as an editor does: the header is the first."""
    path = table(
        tmp_path,
        {},
        {"fsdp": "256"},
        {"gpu": "H1000"},
        {"seconds": "0"},
        {"microbatch": "two", "remat": "ful"},
        {"system": "mine", "practice": "OURS"},
        {"seconds": "1.0"},
        {"source": ""},
        {"pipe": "512", "fsdp": "1"},
    )
    with pytest.raises(JaxparError) as refused:
        load(path)
    said = [problem.got for problem in refused.value.problems]
    lines = [int(got.split()[1]) for got in said]
    assert lines == [3, 4, 5, 6, 6, 7, 8, 9, 10, 10]
    assert f"line 3 of {path}: fsdp 256 on 512 GPUs" in said[0]
    assert "H1000" in said[1]
    assert "1007 tok/s/GPU MFU 41.25 published" in said[6]
    assert "80 layers on 512 stages" in said[8]


def test_a_schedule_that_does_not_take_a_lines_numbers_is_refused_by_its_line(tmp_path):
    odd = {"pipe": "4", "fsdp": "128", "chunks": "2", "schedule": "interleaved", "microbatches": "6", "published": ""}
    with pytest.raises(JaxparError, match=r"line 3: .*interleaved"):
        judge_all(load(table(tmp_path, {}, odd)))


@pytest.mark.parametrize(("text", "words"), [("", "no column system"), ("id,system\n1,x\n", "no column model")])
def test_a_table_without_its_columns_is_refused_at_line_1(tmp_path, text, words):
    path = tmp_path / "runs.csv"
    path.write_text(text)
    with pytest.raises(JaxparError, match=f"line 1 of .*{words}"):
        load(path)


def test_columns_that_may_be_missing_have_their_usual_values(tmp_path, package):
    row = package[0].row
    kept = [key for key in row if key not in ("kv_heads", "context", "chunks", "mem", "nic_GBps", "id", "published")]
    (run,) = load(table(tmp_path, {}, columns=kept))
    assert run.candidate == package[0].candidate
    assert run.hardware == package[0].hardware


def test_a_slower_network_is_the_runs_own(tmp_path):
    slow, usual = load(table(tmp_path, {"nic_GBps": "10"}, {}))
    assert slow.hardware.between.bandwidth == pytest.approx(9.2e9)
    assert judge(slow).predicted > judge(usual).predicted


def test_scores_are_those_of_errors_made_by_hand(package):
    factors = (0.9, 1.3, 1.05)
    some = [
        Judged(run=run, time=StepTime(matmuls=run.seconds * factor))
        for run, factor in zip(package, factors, strict=False)
    ]
    found = score(some)
    assert found.bias == pytest.approx(0.25 / 3)
    assert found.mean == pytest.approx(0.15)
    assert (found.median, found.worst) == (pytest.approx(0.1), pytest.approx(0.3))
    assert found.within == pytest.approx(2 / 3)
    published, predicted = ([run.mfu(run.seconds * f) for run, f in zip(package, by, strict=False)]
                            for by in ((1, 1, 1), factors))  # fmt: skip
    assert found.rank == pytest.approx(rank_correlation(predicted, published))
    assert [len(each) for each in grouped(some, "model").values()] == [1, 1, 1]


def test_the_page_shows_every_run_and_escapes_what_a_table_says(package, tmp_path):
    (run,) = load(table(tmp_path, {"group": "<b>&", "source": "<script>"}))
    page = write([judge(each) for each in (*package[:3], run)], title="runs")
    assert page.count("<circle") == 4
    assert "<script" not in page
    assert "&lt;b&gt;&amp;" in page
    assert place(0.0) == 0.5
    assert place(-9.0) == pytest.approx(0.02)


def test_the_verb_prints_runs_and_groups_and_writes_page_and_record(tmp_path, capsys):
    path = table(tmp_path, {}, {"group": "ours", "model": "other"})
    page, record = tmp_path / "a.html", tmp_path / "a.json"
    words = ["--runs", str(path), "--by", "model", "--html", str(page), "--json", str(record)]
    assert bench("planner", words) == 0
    said = capsys.readouterr().out
    assert said.count("llm-foundry mpt-70b, 512 x H100") == 1
    assert "ours" in said
    assert page.read_text().count("<circle") == 2
    assert len(json.loads(record.read_text())["by"]["model"]) == 2


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--leave-out", "group"], "without --runs"),
        (["--runs", "package", "--by", "colour"], "one of group, system, gpu, source, model"),
        (["--runs", "nowhere.csv"], "nowhere.csv"),
    ],
)
def test_the_verb_refuses_what_is_wrong(words, said, capsys):
    assert bench("planner", [*words]) == 1
    assert said in capsys.readouterr().err
