"""Packed tokens are believed only as they were written, and text is read without holding it.

Whatever happens to the files of RUN/data between two starts: the tokens are the same, or the run is refused.
"""

import hashlib
import os
import threading
import time
from pathlib import Path

import numpy as np
import pytest

import jaxpar as jp
from jaxpar.data import tokens as tokenizers
from jaxpar.errors import JaxparError

TEXT = "".join(f"{i} squared is {i * i}, or nearly so.\n" for i in range(3000))


def spec(folder, tokenizer="bytes"):
    (folder / "a.txt").write_text(TEXT)
    (folder / "b.txt").write_text("and a second document, with ümläuts. " * 50)
    return jp.Data(source="text", path=str(folder / "*.txt"), tokenizer=tokenizer, vocab=300, seq=16)


def all_tokens(source):
    return np.array(source.tokens)


def cut(file):
    os.truncate(file, file.stat().st_size // 2)


def zeroed(file):
    file.write_bytes(bytes(file.stat().st_size))


def altered(file):
    data = bytearray(file.read_bytes())
    data[len(data) // 3] ^= 1
    file.write_bytes(data)


def gone(file):
    file.unlink()


def emptied(file):
    file.write_bytes(b"")


@pytest.mark.parametrize("what", ["tokens-*.bin", "tokens-*.json", "bpe-*.json"])
@pytest.mark.parametrize(
    "damage",
    [
        pytest.param(cut, marks=pytest.mark.slow),
        pytest.param(zeroed, marks=pytest.mark.slow),
        pytest.param(altered, marks=pytest.mark.slow),
        gone,
        pytest.param(emptied, marks=pytest.mark.slow),
    ],
)
def test_damaged_files_of_packed_tokens_are_made_again_with_a_word(tmp_path, capsys, what, damage):
    asked = spec(tmp_path, "bpe")
    want = all_tokens(jp.open_data(asked, tmp_path / "data"))
    capsys.readouterr()
    (file,) = (tmp_path / "data").glob(what)
    before = file.read_bytes()
    damage(file)
    again = jp.open_data(asked, tmp_path / "data")
    assert np.array_equal(all_tokens(again), want)
    if not what.endswith("bin") or damage is not gone:
        assert "packed again" in capsys.readouterr().err
    assert what == "tokens-*.json" or file.read_bytes() == before
    jp.open_data(asked, tmp_path / "data")
    assert capsys.readouterr().err == ""


def test_tokens_that_cannot_be_made_again_are_refused(tmp_path, monkeypatch):
    asked = spec(tmp_path)
    jp.open_data(asked, tmp_path / "data")
    (file,) = (tmp_path / "data").glob("tokens-*.bin")
    altered(file)
    monkeypatch.setattr("jaxpar.data.packing.byte_tokens", lambda *_: [b"other tokens"])
    with pytest.raises(JaxparError, match="packing the text again gives other tokens"):
        jp.open_data(asked, tmp_path / "data")


def test_tokens_of_an_older_version_are_packed_again_with_the_same_fingerprint(tmp_path, capsys):
    """Earlier versions wrote no list; what they called a text stays its name, so that their runs go on."""
    asked = spec(tmp_path)
    first = jp.open_data(asked, tmp_path / "data")
    want = hashlib.sha256()
    for name in ("a.txt", "b.txt"):
        data = (tmp_path / name).read_bytes()
        want.update(len(data).to_bytes(8, "big") + data)
    assert first.fingerprint == want.hexdigest()[:16]
    (file,) = (tmp_path / "data").glob("tokens-*.bin")
    assert file.name == f"tokens-bytes-256-{first.fingerprint}.bin"
    (tmp_path / "data" / f"{file.stem}.json").unlink()
    capsys.readouterr()
    assert np.array_equal(all_tokens(jp.open_data(asked, tmp_path / "data")), all_tokens(first))
    assert "packed again" in capsys.readouterr().err


def test_packed_tokens_are_on_the_disk_before_they_have_their_name(tmp_path, monkeypatch):
    synced, named = set(), []
    fsync, replace = os.fsync, Path.replace

    def seen(handle):
        synced.add(os.fstat(handle).st_ino)
        fsync(handle)

    def renamed(path, target):
        named.append((Path(target).name, path.stat().st_ino in synced))
        return replace(path, target)

    monkeypatch.setattr(os, "fsync", seen)
    monkeypatch.setattr(Path, "replace", renamed)
    jp.open_data(spec(tmp_path, "bpe"), tmp_path / "data")
    kinds = [(name.partition("-")[0], Path(name).suffix) for name, _ in named]
    assert kinds == [("bpe", ".json"), ("tokens", ".bin"), ("tokens", ".json")]
    assert all(done for _, done in named)


def test_text_is_tokenized_once_by_those_that_share_a_folder(tmp_path, monkeypatch):
    asked, calls, slow = spec(tmp_path), [], tokenizers.byte_tokens

    def counted(*args):
        calls.append(args)
        time.sleep(0.3)
        yield from slow(*args)

    monkeypatch.setattr("jaxpar.data.packing.byte_tokens", counted)
    found = []
    threads = [threading.Thread(target=lambda: found.append(jp.open_data(asked, tmp_path / "data"))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(calls) == 1
    assert len(found) == 4
    assert all(np.array_equal(all_tokens(each), all_tokens(found[0])) for each in found)


def test_a_process_that_was_killed_while_it_packed_leaves_nothing_behind(tmp_path):
    asked = spec(tmp_path)
    mark = jp.open_data(asked, tmp_path / "other").fingerprint
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / f"tokens-bytes-256-{mark}.host-1.part").write_bytes(b"half")
    jp.open_data(asked, tmp_path / "data")
    assert not list((tmp_path / "data").glob("*.part"))
