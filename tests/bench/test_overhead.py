"""`bench.overhead` beside the expert: rows are kept, one can be chosen, and none begins that may not end in time."""

import itertools
import json
from pathlib import Path

import pytest

from bench.overhead import against_expert as bench

SHOWN = (("launches", 1, ".0f"), ("wire", 2**20, ".3f"))
BYTES = {"temporary": 2**20, "launches": 2, "wire": 2**20}
ROW = {
    "ours": {"processors": BYTES, "H100s": BYTES},
    "expert": {"processors": BYTES, "H100s": BYTES},
    "ratios": {"memory on H100s": 1.0, "step": 1.0},
}


@pytest.fixture
def measured(monkeypatch):
    """The names of the rows that were measured, none of which really is."""
    done = []
    monkeypatch.setattr(bench, "_measured", lambda model, sizes, rounds: done.append((sizes, model.remat)) or ROW)
    return done


def test_a_run_that_was_stopped_goes_on_where_it_was(measured, tmp_path):
    out = str(tmp_path / "rows.jsonl")
    bench.against_expert(only=["fsdp 8"], remat=["none"], out=out)
    result = bench.against_expert(only=["fsdp 8"], out=out)
    assert measured == [({"fsdp": 8}, False), ({"fsdp": 8}, True)]
    assert result["holds"]
    assert list(result["layouts"]) == ["fsdp 8, none", "fsdp 8, full"]


def test_rows_of_another_commit_are_measured_again(measured, tmp_path):
    out = tmp_path / "rows.jsonl"
    bench.against_expert(only=["data 8"], remat=["none"], out=str(out))
    line = json.loads(out.read_text())
    out.write_text(json.dumps(line | {"where": line["where"] | {"commit": "another"}}) + "\n")
    bench.against_expert(only=["data 8"], remat=["none"], out=str(out))
    assert len(measured) == 2


def test_no_row_is_started_that_may_not_end_in_time(measured, capsys):
    seconds = itertools.count(step=120)  # two minutes pass between two looks at the clock
    result = bench.against_expert(only=["data 8"], minutes=5, clock=lambda: next(seconds))
    assert len(measured) == 1
    assert not result["holds"]
    assert "not started" in capsys.readouterr().out


def test_the_table_of_the_readme_is_what_its_record_says():
    here = Path(bench.__file__).parent.parent
    (record,) = (here / "records").glob("expert_*.json")
    table = (here / "README.md").read_text()
    rows = json.loads(record.read_text())
    assert len(rows) == 8
    for row in rows:
        ours, theirs = row["ours"], row["expert"]
        memory = [f"{ours[on]['temporary'] / 2**20:.1f} / {theirs[on]['temporary'] / 2**20:.1f}" for on in ours]
        on = "H100s"
        launches, wire = (f"{ours[on][key] / by:{how}} / {theirs[on][key] / by:{how}}" for key, by, how in SHOWN)
        assert f"| {row['row']} | {row['ratios']['step']:.3f} | {' | '.join([*memory, launches, wire])} |" in table
        assert row["rounds"] >= 60
        assert all(row["ratios"][name] <= bound for name, bound in bench.BOUNDS.items())
