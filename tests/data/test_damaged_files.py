"""Files that are pipes, endless, enormous or damaged are refused by name: nothing waits, and no foreign error comes."""

import json
import os
import socket
import time
import zipfile

import numpy as np
import pytest

from jaxpar import JaxparError
from jaxpar.data.arrays import load_arrays
from jaxpar.data.tokenizers.tokenizer_facts import read_config, read_json, read_template
from jaxpar.job.file.parse import load, loads
from jaxpar.job.report.page import render
from jaxpar.job.report.read import read
from jaxpar.mesh.chip_file import read_chip_tables
from jaxpar.models.huggingface.folder import read_config as read_model_config
from jaxpar.models.huggingface.safetensors import entries, folder_entries


def _pipe(path):
    os.mkfifo(path)
    return path


@pytest.mark.parametrize(
    ("name", "reader"),
    [
        ("model.safetensors", entries),
        ("model.safetensors", lambda file: folder_entries(file.parent)),
        ("model.safetensors.index.json", lambda file: folder_entries(file.parent)),
        ("config.json", read_model_config),
        ("tokenizer.json", read_json),
        ("a.npz", load_arrays),
        ("a.npy", load_arrays),
        ("a.npy", lambda file: load_arrays(file.parent)),
    ],
)
def test_a_named_pipe_is_refused_and_not_waited_for(tmp_path, name, reader):
    with pytest.raises(JaxparError, match="named pipe"):
        reader(_pipe(tmp_path / name))


def test_a_socket_and_a_device_are_refused_as_weights(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind("model.safetensors")
        with pytest.raises(JaxparError, match="a socket"):
            folder_entries(tmp_path)
    (tmp_path / "other.safetensors").symlink_to("/dev/zero")
    with pytest.raises(JaxparError, match="a device"):
        entries(tmp_path / "other.safetensors")


def test_dotted_keys_of_thousands_of_words_are_refused_at_once(tmp_path):
    began = time.monotonic()
    long = ".".join(["a"] * 20_000)
    for text in (f"{long} = 1", f"[{long}]", f"[train]\nsteps = {{{long} = 1}}", f"a . {long} = 1", "x" * 2**20 + "."):
        with pytest.raises(JaxparError):
            loads(text)
    with pytest.raises(JaxparError):
        loads("", [f"train.steps={{{long}=1}}"])
    (tmp_path / "chip.toml").write_text(f"{long} = 1\n")
    with pytest.raises(JaxparError, match="dotted key"):
        read_chip_tables(tmp_path / "chip.toml")
    assert time.monotonic() - began < 2


def test_dots_in_text_and_comments_of_a_job_are_no_dotted_key():
    dots = ".".join(["a"] * 50)
    assert loads(f'# {dots}\n[data]\nsource = "text"\npath = "{dots}"\npattern = \'{dots}\'').data.path == dots


def test_a_job_without_an_end_is_refused():
    with pytest.raises(JaxparError, match="characters"):
        load("/dev/zero")


def test_damaged_arrays_are_refused_by_name(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.npz", "w") as file:
        file.writestr("README.txt", "hello")
    with pytest.raises(JaxparError, match="README"):
        load_arrays(tmp_path / "a.npz")
    np.save(tmp_path / "good.npy", np.arange(3))
    whole = (tmp_path / "good.npy").read_bytes()
    (tmp_path / "good.npy").unlink()
    begin, shape = whole.index(b"{"), whole.index(b"(3,)")
    damaged = {
        "true": whole[:shape] + b"(True,)" + whole[shape + 7 :],
        "brackets": whole[:begin] + b"(" * 117 + b"\n" + whole[begin + 118 :],
        "negative": whole[:shape] + b"(-3,)" + whole[shape + 5 :],
        "huge": whole[:shape] + b"(9999999999999999999,)" + whole[shape + 22 :],
    }
    for name, content in damaged.items():
        (tmp_path / f"{name}.npy").write_bytes(content)
        with pytest.raises(JaxparError, match=name):
            load_arrays(tmp_path / f"{name}.npy")


@pytest.mark.parametrize("template", [[1, 2], 3, [{"name": "default", "template": 4}], {"a": "b"}])
def test_a_chat_template_that_is_no_text_is_refused_or_left_out(tmp_path, template):
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": template}))
    file = tmp_path / "tokenizer.json"
    if template == [1, 2]:
        assert read_template(file, read_config(file)) == ""
    else:
        with pytest.raises(JaxparError, match="chat_template"):
            read_template(file, read_config(file))


ROW = {"step": 1, "loss": 2.0, "tokens": 8, "seconds": 0.5, "tokens_per_second": 16.0}
DEEP = "[" * 100_000


@pytest.mark.parametrize(
    ("file", "content"),
    [
        ("metrics.jsonl", DEEP + "\n" + json.dumps(ROW)),
        ("metrics.jsonl", json.dumps(ROW | {"loss": 10**400})),
        ("metrics.jsonl", json.dumps(ROW | {"tokens": "many"})),
        ("metrics.jsonl", json.dumps(ROW | {"seconds": [1]})),
        ("metrics.jsonl", json.dumps(ROW | {"step": True})),
        ("events.jsonl", '{"said": "saved", "step": "two"}'),
        ("events.jsonl", '{"said": "saved", "step": 2, "time": 1e300}'),
        ("events.jsonl", '{"said": "saved", "step": 2, "time": "noon"}'),
        ("run.json", DEEP),
        ("run.json", '{"mesh": [1, 2]}'),
        ("run.json", '{"versions": "1"}'),
        ("run.json", '{"mesh": {"data": "two"}}'),
        ("run.json", '{"parameters": "many"}'),
        ("run.json", '{"layout": {"cards": [1]}}'),
        ("run.json", '{"peak": {"compiled": "much"}}'),
        ("job.toml", "a = " + DEEP),
    ],
    ids=[f"{number}" for number in range(16)],
)
def test_a_report_names_the_file_that_was_altered(tmp_path, file, content):
    (tmp_path / "metrics.jsonl").write_text(json.dumps(ROW) + "\n")
    (tmp_path / file).write_text(content + "\n")
    with pytest.raises(JaxparError, match=file):
        render(read(tmp_path))


def test_a_report_reads_rows_without_seconds_and_texts_with_line_separators(tmp_path):
    rows = [{"step": step, "loss": 2.0} for step in range(1, 20)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(map(json.dumps, rows)) + "\n")
    (tmp_path / "run.json").write_text('{"devices": "8 gpu"}')
    (tmp_path / "events.jsonl").write_text('{"said": "saved\u2028here", "step": 2, "time": 5.0}\n', encoding="utf-8")
    assert "saved" in render(read(tmp_path))
