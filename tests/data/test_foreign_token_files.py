"""Token ids in files of nanoGPT, llm.c, Megatron and NumPy are rows of a batch, without being copied."""

import io
import json
import struct

import numpy as np
import pytest

import jaxpar as jp
from jaxpar import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads

jp.simulate(8)

IDS = np.random.default_rng(0).integers(0, 250, 1001)


def _llm_c(path, kind, magic):
    header = np.zeros(256, np.int32)
    header[:3] = magic, 1, len(IDS)
    path.write_bytes(header.tobytes() + IDS.astype(kind).tobytes())


def _megatron(path, code, kind):
    path.write_bytes(IDS.astype(kind).tobytes())
    lengths = np.array([400, 0, 601], np.int32)
    starts = np.array([0, 400, 400], np.int64) * np.dtype(kind).itemsize
    head = b"MMIDIDX\0\0" + struct.pack("<QBQQ", 1, code, 3, 4)
    documents = np.array([0, 1, 2, 3], np.int64)
    path.with_suffix(".idx").write_bytes(head + lengths.tobytes() + starts.tobytes() + documents.tobytes())


WRITERS = {
    "npy of int64": ("a.npy", lambda path: np.save(path, IDS)),
    "npy of uint16": ("a.npy", lambda path: np.save(path, IDS.astype(np.uint16))),
    "nanoGPT": ("a.bin", lambda path: IDS.astype(np.uint16).tofile(path)),
    "llm.c gpt-2": ("a.bin", lambda path: _llm_c(path, np.uint16, 20240520)),
    "llm.c llama 3": ("a.bin", lambda path: _llm_c(path, np.uint32, 20240801)),
    "megatron uint16": ("a.bin", lambda path: _megatron(path, 8, np.uint16)),
    "megatron int32": ("a.bin", lambda path: _megatron(path, 4, np.int32)),
}


@pytest.mark.parametrize("case", WRITERS)
def test_token_ids_of_others_are_rows_of_a_batch(tmp_path, case):
    name, write = WRITERS[case]
    write(tmp_path / name)
    spec = jp.Data(source="arrays", path=str(tmp_path / name), seq=10, held_out=0.0, shuffle=False)
    data = jp.open_data(spec)
    assert isinstance(data.tokens, np.memmap)
    assert data.examples == 100
    batch = data.batch(2, 4)  # rows 8 to 11
    assert batch["inputs"].dtype == np.int32
    assert (batch["inputs"].reshape(-1) == IDS[80:120]).all()
    assert (batch["targets"].reshape(-1) == IDS[81:121]).all()
    assert len(data.fingerprint) == 16


def test_a_cut_off_stream_is_refused_by_name(tmp_path):
    for writer in ("nanoGPT", "llm.c gpt-2", "megatron uint16"):
        name, write = WRITERS[writer]
        write(tmp_path / name)
        (tmp_path / name).write_bytes((tmp_path / name).read_bytes()[:-1])
        with pytest.raises(JaxparError, match="bytes"):
            jp.open_data(jp.Data(source="arrays", path=str(tmp_path / name)))
    (tmp_path / "a.idx").write_bytes(b"hello")
    with pytest.raises(JaxparError, match=r"a.idx"):
        jp.open_data(jp.Data(source="arrays", path=str(tmp_path / "a.bin")))


@pytest.mark.nightly
def test_a_job_trains_on_a_stream_of_token_ids(tmp_path):
    WRITERS["nanoGPT"][1](tmp_path / "a.bin")
    text = f"""
[model]
name = "decoder"
vocab = 256
dim = 16
layers = 1
heads = 2
[parallel]
data = 8
[data]
source = "arrays"
path = "{tmp_path}/a.bin"
seq = 10
[train]
steps = 2
global_batch = 8
[run]
dir = "{tmp_path}/run"
"""
    job = loads(text)
    assert not check(job)
    run.train(job, stream=io.StringIO())
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert abs(rows[0]["loss"] - np.log(256)) < 0.5
