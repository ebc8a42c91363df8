"""Batches are pure functions of the step; text becomes tokens and back."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import jaxpar as jp
from jaxpar.data.arrays import Arrays, load_arrays
from jaxpar.data.iterables import Stream
from jaxpar.data.text import order, split_held_out, stdlib_files
from jaxpar.data.tokens import RunTokenizer


@given(examples=st.integers(1, 60), batch=st.integers(1, 20), epochs=st.integers(1, 3), seed=st.integers(0, 9))
@settings(max_examples=60, deadline=None)
def test_every_example_comes_once_per_epoch(examples, batch, epochs, seed):
    steps = -(-examples * epochs // batch)
    seen = np.concatenate([order(step, batch, examples, seed=seed) for step in range(steps)])[: examples * epochs]
    for epoch in range(epochs):
        assert sorted(seen[epoch * examples : (epoch + 1) * examples]) == list(range(examples))


@given(step=st.integers(0, 10**6), batch=st.integers(1, 64), examples=st.integers(1, 999))
@settings(max_examples=60, deadline=None)
def test_a_batch_depends_on_the_step_alone(step, batch, examples):
    first = order(step, batch, examples, seed=1)
    order(step + 1, batch, examples, seed=1)
    assert np.array_equal(first, order(step, batch, examples, seed=1))
    assert ((first >= 0) & (first < examples)).all()


@given(examples=st.integers(0, 500), fraction=st.floats(0, 0.5))
@settings(max_examples=60, deadline=None)
def test_held_out_and_training_examples_are_all_examples_once(examples, fraction):
    train, out = split_held_out(examples, fraction)
    assert sorted([*train[np.arange(len(train))], *out]) == list(range(examples))
    assert len(out) <= examples * max(fraction, 0) * 1.5 + 1


def test_text_is_windows_of_the_files_and_targets_are_one_ahead(tmp_path):
    (tmp_path / "a.txt").write_text("abcdefghij" * 20)
    source = jp.open_data(jp.Data(source="text", path=str(tmp_path / "a.txt"), seq=5, held_out=0.1), tmp_path / "data")
    batch = source.batch(0, 4)
    assert batch["inputs"].shape == batch["targets"].shape == (4, 5)
    assert batch["inputs"].dtype == np.int32
    assert np.array_equal(batch["inputs"][:, 1:], batch["targets"][:, :-1])
    text = bytes(batch["inputs"][0].tolist()).decode()
    assert text in "abcdefghij" * 3


def test_folders_globs_and_lists_name_the_same_files(tmp_path):
    for name in ("a", "b"):
        (tmp_path / f"{name}.txt").write_text(name * 100)
    ways = [str(tmp_path), str(tmp_path / "*.txt"), [str(tmp_path / "a.txt"), str(tmp_path / "b.txt")]]
    marks = {
        jp.open_data(jp.Data(source="text", path=way, seq=5, pattern="*.txt"), tmp_path / "d").fingerprint
        for way in ways
    }
    assert len(marks) == 1
    (tmp_path / "b.txt").write_text("c" * 100)
    changed = jp.open_data(jp.Data(source="text", path=ways[1], seq=5), tmp_path / "d").fingerprint
    assert changed not in marks


def test_tokens_are_packed_once_and_memmapped(tmp_path):
    spec = jp.Data(source="text", path=str(tmp_path / "a.txt"), seq=5)
    (tmp_path / "a.txt").write_text("abcdefghij" * 20)
    first = jp.open_data(spec, tmp_path / "data")
    (file,) = (tmp_path / "data").glob("tokens-*.bin")
    stamp = file.stat().st_mtime_ns
    again = jp.open_data(spec, tmp_path / "data")
    assert file.stat().st_mtime_ns == stamp
    assert isinstance(again.tokens, np.memmap)
    assert np.array_equal(first.batch(3, 4)["inputs"], again.batch(3, 4)["inputs"])


def test_a_bpe_is_trained_on_the_text_and_reads_back(tmp_path):
    (tmp_path / "a.txt").write_text("the cat sat on the mat. " * 50)
    spec = jp.Data(source="text", path=str(tmp_path / "a.txt"), tokenizer="bpe", vocab=300, seq=8)
    batch = jp.open_data(spec, tmp_path / "data").batch(0, 2)
    assert batch["inputs"].max() < 300
    text = RunTokenizer(tmp_path / "data", "bpe")
    assert text.decode(text.encode("the cat sat")) == "the cat sat"
    assert len(text.encode("the cat sat")) < len("the cat sat") / 2
    assert text.decode(batch["inputs"][0].tolist()) in "the cat sat on the mat. " * 20


@pytest.mark.slow
def test_the_default_text_is_this_machines_python():
    files = stdlib_files()
    assert len(files) > 300
    assert any(file.name == "argparse.py" for file in files)
    assert not any("site-packages" in file.parts or "test" in file.parts for file in files)


def test_digits_are_handwriting(tmp_path):
    source = jp.open_data(jp.Data(source="digits", held_out=0.2), tmp_path)
    batch = source.batch(0, 32)
    assert batch["inputs"].shape == (32, 8, 8)
    assert 0 <= batch["inputs"].min() < batch["inputs"].max() <= 1
    assert len(source.train_indices) + len(source.held_out_indices) == 1797


def test_evaluation_covers_every_held_out_example_once(tmp_path):
    source = Arrays({"inputs": np.arange(50)}, jp.Data(held_out=0.25), seed=0)
    seen, index = np.zeros(50), 0
    while batches := source.evaluation(index, 5):
        for each in batches:
            np.add.at(seen, each.batch["inputs"], each.weight)
        index += 1
    assert np.flatnonzero(seen.round(12)).tolist() == source.held_out_indices.tolist()
    assert seen[source.held_out_indices] == pytest.approx(1)


@pytest.mark.parametrize("kind", ["npz", "npy", "folder"])
def test_arrays_come_from_files(tmp_path, kind):
    inputs, labels = np.arange(12.0).reshape(6, 2), np.arange(6)
    if kind == "npz":
        np.savez(tmp_path / "a.npz", inputs=inputs, labels=labels)
        found = load_arrays(tmp_path / "a.npz")
    elif kind == "npy":
        np.save(tmp_path / "a.npy", inputs)
        found = load_arrays(tmp_path / "a.npy")
    else:
        np.save(tmp_path / "inputs.npy", inputs)
        np.save(tmp_path / "labels.npy", labels)
        found = load_arrays(tmp_path)
    assert np.array_equal(found["inputs"], inputs)
    batch = Arrays(found, jp.Data(source="arrays", path="-"), seed=0).batch(0, 2)
    assert batch["inputs"].dtype == np.float32
    assert kind == "npy" or batch["labels"].dtype == np.int32


def test_an_iterable_is_drawn_up_to_the_step_and_again_from_the_start():
    source = Stream([{"inputs": np.full((2,), i)} for i in range(5)], "five")
    assert source.batch(3, 2)["inputs"][0] == 3
    assert source.batch(4, 2)["inputs"][0] == 4
    assert source.batch(1, 2)["inputs"][0] == 1
    with pytest.raises(jp.JaxparError, match="ended after 5 batches"):
        source.batch(5, 2)
