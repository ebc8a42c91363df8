"""Data and models as others leave them: what jaxpar does not read is refused with a command that makes it readable."""

import json
import os
from pathlib import Path

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.buckets import check_address
from jaxpar.cli.main import main
from jaxpar.errors import JaxparError
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads

ROWS = [{"text": f"row {i} of a file that is no JSONL " * 8} for i in range(40)]


@pytest.fixture(autouse=True)
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def refusal(function, *args, **kwargs):
    with pytest.raises(JaxparError) as caught:
        function(*args, **kwargs)
    (problem,) = caught.value.problems
    return problem


def opened(source, path):
    return jp.open_data(jp.Data(source=source, path=path, seq=32), "data")


@pytest.mark.parametrize(("indent", "filter"), [(None, ".[]"), (1, ".[]")])
def test_a_json_array_is_refused_with_the_command_that_makes_jsonl_of_it(indent, filter, here):
    (here / "my rows.json").write_text(json.dumps(ROWS, indent=indent))
    problem = refusal(opened, "jsonl", "my rows.json")
    assert problem.fix == f"jq -c '{filter}' 'my rows.json' > 'my rows-rows.jsonl'"


def test_the_command_that_makes_jsonl_writes_another_file_than_it_reads(here):
    (here / "rows.jsonl").write_text(json.dumps(ROWS))
    assert refusal(opened, "jsonl", "rows.jsonl").fix == "jq -c '.[]' rows.jsonl > rows-rows.jsonl"


@pytest.mark.parametrize("text", ["[1, 2, 3]\n[4]\n", "[\n1,\n2\n]", "[]", '["a"]'])
def test_an_array_of_other_values_than_objects_is_not_made_into_rows(text, here):
    (here / "ids.jsonl").write_text(text)
    assert "jq" not in refusal(opened, "jsonl", "ids.jsonl").fix


def test_a_csv_is_refused_with_the_line_that_makes_jsonl_of_it(here):
    (here / "rows.csv").write_text("text\n" + "\n".join(f'"{row["text"]}"' for row in ROWS))
    problem = refusal(opened, "jsonl", "rows.csv")
    write = "to_json('rows-rows.jsonl', orient='records', lines=True)"
    assert problem.fix == f"in Python pandas.read_csv('rows.csv').{write}"


@pytest.mark.parametrize("kind", ["file", "stream"])
def test_arrow_of_datasets_is_refused_as_such_in_both_of_its_forms(kind, here):
    pyarrow = pytest.importorskip("pyarrow")
    table = pyarrow.table({"text": [row["text"] for row in ROWS]})
    with pyarrow.OSFile("data.arrow", "wb") as sink, getattr(pyarrow.ipc, f"new_{kind}")(sink, table.schema) as writer:
        writer.write_table(table)
    problem = refusal(opened, "jsonl", "data.arrow")
    assert problem.got.startswith("data.arrow is Arrow")
    assert problem.fix.startswith("datasets.load_from_disk(FOLDER).to_parquet(FILE)")


@pytest.mark.parametrize(
    ("source", "fix"),
    [
        ("a.arrow", "write it as JSONL or Parquet, as by to_parquet of datasets"),
        ("csv", "write it as JSONL or Parquet, as by to_json(orient='records', lines=True) of pandas"),
        ("shards/a.tar", 'source = "images", path = "shards/a.tar"'),
        ("a.jsonl.gz", 'source = "jsonl", path = "a.jsonl.gz"'),
        ("me/web", 'hf download --repo-type dataset me/web --local-dir web, and source = "parquet", path = "web", or'),
        ("hf://datasets/me/web", "hf download --repo-type dataset me/web --local-dir web, and"),
    ],
)
def test_a_source_that_is_a_file_or_a_data_set_of_the_hub_is_told_how_it_is_read(source, fix):
    assert refusal(jp.Data, source=source).fix.startswith(fix)


def test_a_name_on_this_machine_is_not_looked_for_on_the_hub(here, capsys):
    Path("data/mytext").mkdir(parents=True)
    Path("runs/quickstart").mkdir(parents=True)
    assert (
        refusal(jp.Data, source="data/mytext").fix
        == 'path = "data/mytext", and the source of its files, such as "text"'
    )
    for source, fix in (
        ("data/train.csv", "write it as JSONL"),
        ("more/book.html", "one of:"),
        ("data/typo", "one of:"),
    ):
        assert refusal(jp.Data, source=source).fix.startswith(fix)
    assert main(["evaluate", "runs/quikstart"]) == 1
    assert "fix:  jaxpar evaluate runs/quickstart" in capsys.readouterr().err
    (problem,) = check(loads("", ["data.tokenizer=tokenizers/tokenizer.json", "mesh.simulate=1"]))
    assert problem.fix.startswith("a folder with a tokenizer.json")


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("hf://me/my-llama", 'hf download me/my-llama --local-dir my-llama, and name = "my-llama"; or'),
        ("https://huggingface.co/me/my-llama", 'hf download me/my-llama --local-dir my-llama, and name = "my-llama"'),
        ("file:///models/my-llama", 'name = "/models/my-llama"'),
        ("gs://models/my-llama", "the path of a folder that is there"),
    ],
)
def test_the_address_of_a_model_is_no_module(name, fix):
    (problem,) = check(loads("", [f'model.name="{name}"', "mesh.simulate=1"]))
    assert "an address" in problem.got
    assert problem.fix.startswith(fix)


def test_the_cache_of_hugging_face_is_answered_with_its_newest_snapshot(here, capsys):
    for number, name in enumerate(("old", "new")):
        snapshot = here / "hub/models--me--my/snapshots" / name
        snapshot.mkdir(parents=True)
        (snapshot / "config.json").write_text("{}")
        os.utime(snapshot, (number, number))
    (problem,) = check(loads("", ['model.name="hub/models--me--my"', "mesh.simulate=1"]))
    assert problem.fix == 'name = "hub/models--me--my/snapshots/new"'
    assert main(["evaluate", "hub/models--me--my"]) == 1
    assert "fix:  jaxpar evaluate hub/models--me--my/snapshots/new" in capsys.readouterr().err


def test_a_model_of_the_hub_is_not_evaluated_before_it_is_downloaded(capsys):
    assert main(["evaluate", "me/my-llama"]) == 1
    said = capsys.readouterr().err
    assert "fix:  hf download me/my-llama --local-dir my-llama, then jaxpar evaluate my-llama; or" in said


def test_a_tokenizer_of_the_hub_is_told_how_it_is_downloaded():
    (problem,) = check(loads("", ["data.tokenizer=me/my-llama", "mesh.simulate=1"]))
    assert problem.fix.startswith('hf download me/my-llama --local-dir my-llama, and tokenizer = "my-llama"; or')


@pytest.mark.parametrize(
    ("scheme", "said", "packages"),
    [
        ("https", 'HTTPFileSystem requires "requests" and "aiohttp" to be installed', "requests aiohttp"),
        ("github", "Install the requests package to use the github FS", "requests"),
        ("sftp", 'SFTPFileSystem requires "paramiko" to be installed', "paramiko"),
        ("hf", "Unable to load EntryPoint(name='hf', value='huggingface_hub.HfFileSystem')", "huggingface_hub"),
        ("s3", "Install s3fs to access S3", "s3fs"),
    ],
)
def test_a_scheme_whose_package_is_missing_names_it_and_not_itself(scheme, said, packages, monkeypatch):
    def missing(_):
        raise ImportError(said)

    monkeypatch.setattr("fsspec.get_filesystem_class", missing)
    problem = refusal(check_address, f"{scheme}://x/y", "data.path")
    assert problem.fix.startswith(f"pip install {packages}; or")


def test_big_endian_arrays_are_rows_like_others(here):
    inputs, labels = np.arange(160, dtype=">f8").reshape(20, 8), np.arange(20, dtype=">i4")
    np.savez("big.npz", inputs=inputs, labels=labels)
    (here / "mapped").mkdir()
    np.save("mapped/inputs.npy", inputs.astype(">f4"))
    for path in ("big.npz", "mapped"):
        batch = jp.open_data(jp.Data(source="arrays", path=path, held_out=0.0, shuffle=False)).batch(0, 4)
        assert {value.dtype for value in batch.values()} <= {np.dtype(np.float32), np.dtype(np.int32)}
        np.testing.assert_array_equal(batch["inputs"], inputs[:4])


def test_a_negative_token_is_the_one_that_is_named():
    np.save("ids.npy", np.array([7, 199, -1, 5] * 100))
    source = jp.open_data(jp.Data(source="arrays", path="ids.npy", seq=16))
    assert refusal(source.batch, 0, 4).got == "ids.npy: token -1"
