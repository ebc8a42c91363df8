"""Text of any size: read in blocks, tokenized in pieces, and only if it is not packed already."""

import os
import subprocess
import sys
import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.data import corpus
from jaxpar.data.arrays import load_arrays
from jaxpar.data.corpus import Corpus
from jaxpar.data.text import permutation, split_held_out
from jaxpar.data.tokens import bpe_tokens, train_bpe
from jaxpar.errors import JaxparError

WORDS = st.sampled_from(
    ["a", "cat", "don't", "12", "...", "ü", "。", "\u3000", "\xa0", " ", "  ", "\n", "\n\n", "\t", "\r\n", "<end>"]
)
HELD = """
import sys
import numpy as np
import jaxpar as jp
from pathlib import Path

def peak():
    return int(next(line for line in open("/proc/self/status") if line.startswith("VmHWM")).split()[1]) / 1024

kind, path, folder = sys.argv[1:]
spec = jp.Data(source=kind, path=path, seq=128, held_out=0.1)
(Path(folder) / "small").mkdir()
small = Path(folder) / "small" / Path(path).name
np.save(small, np.zeros((64, 128), np.uint16)) if kind == "arrays" else small.write_text("the cat sat. " * 500)
source = jp.open_data(jp.Data(source=kind, path=str(small), seq=128, held_out=0.1), Path(folder) / "data")
source.batch(0, 8), source.evaluation(0, 8), source.fingerprint
before = peak()
source = jp.open_data(spec, Path(folder) / "data")
source.batch(0, 8), source.evaluation(0, 8), source.fingerprint
print(peak() - before)
"""


def held(kind, path, folder):
    """Returns the MiB that a process needs more for a large file than for a small one, at its most."""
    done = subprocess.run(
        [sys.executable, "-c", HELD, kind, str(path), str(folder)], capture_output=True, text=True, check=True
    )
    return float(done.stdout)


@pytest.mark.nightly
def test_memory_does_not_grow_with_the_text(tmp_path):
    line = b"the quick brown fox jumps over the lazy dog, and the dog sleeps on.\n"
    with (tmp_path / "a.txt").open("wb") as out:
        for _ in range(256):
            out.write(line * (2**20 // len(line)))
    assert held("text", tmp_path / "a.txt", tmp_path) < 100


@pytest.mark.nightly
def test_memory_does_not_grow_with_a_mapped_array(tmp_path):
    array = np.lib.format.open_memmap(tmp_path / "a.npy", "w+", np.uint16, (2**20, 128))
    array[:] = 7
    array.flush()
    assert held("arrays", tmp_path / "a.npy", tmp_path) < 100


@pytest.fixture(scope="module")
def bpe(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bpe")
    (folder / "a.txt").write_text("the cat didn't sit on the mat.\n\n  12 cats do。 \u3000 \n" * 40)
    return train_bpe(Corpus((folder / "a.txt",)), 320, folder / "bpe.json", lambda _: None)


@pytest.mark.nightly
@given(words=st.lists(WORDS, max_size=60), piece=st.integers(1, 9))
@settings(max_examples=300, deadline=None)
def test_tokens_of_the_pieces_are_those_of_the_whole_text(tmp_path_factory, bpe, words, piece):
    text = "".join(words)
    file = tmp_path_factory.mktemp("t") / "a.txt"
    file.write_bytes(text.encode())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(corpus, "PIECE", piece)
        patch.setattr(corpus, "BLOCK", 7)  # also within a character
        parts = list(corpus.pieces(file))
        found = b"".join(bpe_tokens(Corpus((file,)), bpe, np.dtype(np.uint16), lambda _: None))
    assert "".join(parts) == text
    assert np.frombuffer(found, np.uint16).tolist() == [*bpe.encode(text).ids, 0]


def test_text_without_a_place_to_cut_is_cut_all_the_same(tmp_path):
    (tmp_path / "a.txt").write_text("x" * (3 * corpus.LONGEST))
    assert [len(piece) for piece in corpus.pieces(tmp_path / "a.txt")] == [corpus.LONGEST] * 3


def test_text_that_is_packed_is_not_read_again_until_it_changes(tmp_path, monkeypatch):
    file, reads, blocks = tmp_path / "a.txt", [], corpus.blocks
    monkeypatch.setattr(corpus, "blocks", lambda path: reads.append(path) or blocks(path))
    spec = jp.Data(source="text", path=str(file), seq=8)

    def opened(text, age):
        if text:
            file.write_text(text)
        os.utime(file, (time.time() - age,) * 2)
        reads.clear()
        return jp.open_data(spec, tmp_path / "data").fingerprint, len(reads)

    first, _ = opened("the cat sat. " * 20, 100)
    assert opened(None, 100)[0] == first
    os.utime(file, (1e9, 1e9))
    assert jp.open_data(spec, tmp_path / "data").fingerprint == first  # touched: read, found the same, noted
    reads.clear()
    assert jp.open_data(spec, tmp_path / "data").fingerprint == first
    assert not reads
    assert opened("the dog sat. " * 20, 50)[0] != first
    again, count = opened("the pig sat. " * 20, 0)  # so new that its time says nothing
    assert count == 1
    assert opened(None, 0) == (again, 1)


def test_long_work_on_a_text_tells_how_far_it_is(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("jaxpar.data.packing.EVERY", 0.0)
    (tmp_path / "a.txt").write_text("the cat sat. " * 2000)
    spec = jp.Data(source="text", path=str(tmp_path / "a.txt"), tokenizer="bpe", vocab=300, seq=8)
    jp.open_data(spec, tmp_path / "data")
    said = capsys.readouterr().err
    for what in ("reading the text: 25.39 KiB of 25.39 KiB", "training a bpe: ", "tokenizing: ", " tokens in "):
        assert what in said


@pytest.mark.parametrize("examples", [1, 2, 7, 100, 70_001])
@pytest.mark.parametrize("fraction", [0.0, 0.02, 0.1, 0.5])
def test_the_order_of_examples_is_what_it_was(examples, fraction):
    """A run that is resumed sees the examples that it would have seen: arrays of indices, as they were made before."""
    wanted = np.random.Generator(np.random.Philox(key=[3, 1])).permutation(examples)
    assert np.array_equal(permutation(examples, 3, 1), wanted)
    train, out = split_held_out(examples, fraction)
    every = max(2, round(1 / fraction)) if fraction * examples >= 0.5 else 0
    left_out = np.arange(every - 1, examples, every) if every else np.arange(0)
    assert np.array_equal(out, left_out)
    assert np.array_equal(train[np.arange(len(train))], np.setdiff1d(np.arange(examples), left_out))


def test_a_mapped_array_of_64_bits_is_as_one_of_32(tmp_path):
    values = np.random.default_rng(0).integers(0, 99, (50, 8))
    for dtype in (np.int64, np.int32):
        np.save(tmp_path / f"{np.dtype(dtype).name}.npy", values.astype(dtype))
    wide, narrow = (
        jp.open_data(jp.Data(source="arrays", path=str(tmp_path / f"{name}.npy"))) for name in ("int64", "int32")
    )
    assert wide.fingerprint == narrow.fingerprint
    assert wide.batch(1, 8)["inputs"].dtype == np.int32
    values[40, 3] = 2**31
    np.save(tmp_path / "int64.npy", values)
    with pytest.raises(JaxparError, match="inputs has 2147483648"):
        load_arrays(tmp_path / "int64.npy", check_all=True)
    with pytest.raises(JaxparError, match="inputs has 2147483648"):
        _ = jp.open_data(jp.Data(source="arrays", path=str(tmp_path / "int64.npy"))).fingerprint
