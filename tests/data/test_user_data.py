"""Data of one's own: read by number or as a stream, a process only its rows, and on from where a run was stopped."""

import io
import json
import os

import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from flax import nnx

import jaxpar as jp
from jaxpar.data.sources import open_data
from jaxpar.data.streams import stateful
from jaxpar.errors import JaxparError
from jaxpar.job import run
from jaxpar.job.check import check
from jaxpar.job.file.parse import loads

jp.simulate(8)
SPEC = jp.Data(source="mine:data")


def example(number):
    return {"inputs": np.full((3,), number, np.float32), "labels": np.int32(number % 10)}


class Numbered:
    """A map-style dataset, as PyTorch's and Hugging Face's are."""

    def __init__(self, count=100):
        self.count, self.read = count, []

    def __len__(self):
        return self.count

    def __getitem__(self, number):
        self.read.append(number)
        return example(number)


def numbers(batch):
    return batch["inputs"][:, 0].astype(int).tolist()


def joined(lists):
    return [each for some in lists for each in some]


def opened(named, folder=None, **keys):
    return open_data(SPEC, folder or "nowhere", named=named, **keys)


def grain_map(count=100):
    grain = pytest.importorskip("grain")
    return grain.MapDataset.source(list(range(count))).seed(3).shuffle().map(example)


def test_examples_by_number_are_those_of_a_process_alone_and_each_comes_once_an_epoch():
    dataset = Numbered()
    source = opened(dataset)
    assert source.examples == 98
    whole = [numbers(source.batch(step, 14)) for step in range(7)]
    assert len({*np.concatenate(whole).tolist()}) == 98
    dataset.read.clear()
    assert numbers(source.batch(3, 14, np.array([4, 5]))) == whole[3][4:6]
    assert dataset.read == whole[3][4:6]
    held = source.evaluation(0, 2)
    assert sorted({*numbers(held[0].batch)} | {*np.concatenate(whole).tolist()}) == list(range(100))
    assert opened(Numbered()).fingerprint == source.fingerprint != opened(Numbered(99)).fingerprint


@pytest.mark.slow
def test_a_map_dataset_of_grain_keeps_its_own_order_and_epochs():
    dataset = grain_map()
    source = opened(dataset)
    assert numbers(source.batch(2, 30)) == [
        int(dataset[i]["labels"] * 0 + dataset[i]["inputs"][0]) for i in range(60, 90)
    ]
    seen = joined(numbers(source.batch(step, 25)) for step in range(8))
    assert sorted(seen[:100]) == sorted(seen[100:]) == list(range(100))
    assert seen[:100] != seen[100:]  # another order in the second epoch
    processes = [numbers(source.batch(1, 8, rows)) for rows in (np.arange(4), np.arange(4, 8))]
    assert processes[0] + processes[1] == numbers(source.batch(1, 8))
    assert not {*processes[0]} & {*processes[1]}
    assert opened(dataset.repeat()).examples is None


def grain_stream(shard=0, shards=1, count=100):
    return (
        grain_map(count).repeat()[shard::shards].to_iter_dataset().filter(lambda x: x["labels"] != 3).batch(8 // shards)
    )


@pytest.mark.nightly
def test_a_stream_of_grain_goes_on_from_its_state_and_not_from_its_start(tmp_path, monkeypatch):
    pytest.importorskip("grain")
    monkeypatch.setattr(stateful, "EVERY", 0.0)
    first = opened(grain_stream, tmp_path)
    whole = [numbers(first.batch(step, 8)) for step in range(12)]
    assert len({*joined(whole)}) == 90
    drawn = []

    def counted():
        return grain_stream().map(lambda batch: drawn.append(1) or batch)

    for step in (11, 7, 1, 9):
        drawn.clear()
        again = opened(counted, tmp_path)
        assert numbers(again.batch(step, 8)) == whole[step]
        assert len(drawn) == 1
    with (tmp_path / "stream-0of1.jsonl").open("ab") as file:
        file.write(b'{"next": 11, "sta')  # killed while it wrote
    assert numbers(opened(grain_stream, tmp_path).batch(11, 8)) == whole[11]


@pytest.mark.slow
def test_shards_of_two_processes_share_no_example(tmp_path, monkeypatch):
    pytest.importorskip("grain")
    monkeypatch.setattr(stateful, "EVERY", 0.0)
    seen = []
    for rows in (np.arange(4), np.arange(4, 8)):
        source = opened(grain_stream, tmp_path)
        seen.append([numbers(source.batch(step, 8, rows)) for step in range(9)])
        assert numbers(opened(grain_stream, tmp_path).batch(5, 8, rows)) == seen[-1][5]
    one, other = ({*joined(each)} for each in seen)
    assert not one & other
    assert sorted(file.name for file in tmp_path.iterdir()) == ["stream-0of2.jsonl", "stream-1of2.jsonl"]
    with pytest.raises(JaxparError, match="connected share"):
        source.batch(0, 8, np.array([0, 2]))


@pytest.mark.slow
def test_a_state_of_another_dataset_is_refused(tmp_path, monkeypatch):
    pytest.importorskip("grain")
    monkeypatch.setattr(stateful, "EVERY", 0.0)
    source = opened(grain_stream, tmp_path)
    for step in range(4):
        source.batch(step, 8)
    for named in (lambda: grain_map(41).to_iter_dataset().batch(8), lambda: grain_stream().batch(1)):
        with pytest.raises(JaxparError, match=r"the dataset that it began with"):
            opened(named, tmp_path).batch(3, 8)


def test_states_of_a_run_that_was_given_up_are_not_gone_on_from(tmp_path, monkeypatch):
    """Another dataset of the same name, or another batch, in the same run folder; and states that hold bytes."""
    monkeypatch.setattr(stateful, "MOST_LINES", 4)
    for which, begun in (("old", 0), ("new", 0), ("new", 12)):
        made = stateful.SavedStates(tmp_path / "stream.jsonl", "mine:data")
        made.latest_before(begun)
        for index in range(begun + (6 if which == "old" else 5), begun + 30, 6):
            assert made.append(index, {"of": which.encode()}, "")
    found = [stateful.SavedStates(tmp_path / "stream.jsonl", "mine:data").latest_before(step) for step in range(45)]
    assert {each[1]["of"] for each in found if each} == {b"new"}
    assert found[44][0] == 41


@pytest.mark.slow
def test_a_loader_of_pytorch_is_read_where_its_order_can_be_repeated(tmp_path):
    torch = pytest.importorskip("torch")
    from torch.utils.data import DataLoader

    dataset = Numbered(64)

    def made(seed=0):
        return DataLoader(dataset, batch_size=8, shuffle=True, generator=torch.Generator().manual_seed(seed))

    source = opened(made, tmp_path)
    whole = [numbers(source.batch(step, 8)) for step in range(8)]
    assert sorted(joined(whole)) == list(range(64))
    assert numbers(opened(made, tmp_path).batch(5, 8)) == whole[5]
    with pytest.raises(JaxparError, match="in another order each time"):
        opened(made(), tmp_path)
    with pytest.raises(JaxparError, match="global generator"):
        opened(lambda: DataLoader(dataset, batch_size=8, shuffle=True), tmp_path)
    assert numbers(opened(DataLoader(dataset, batch_size=8), tmp_path).batch(1, 8)) == list(range(8, 16))


@pytest.mark.parametrize("held", [False, True])
def test_a_dict_of_arrays_is_a_row_for_every_example(held):
    whole = [example(number) for number in range(13)]
    arrays = {key: np.stack([each[key] for each in whole]) for key in whole[0]}
    source = opened(Numbered(), held_out=arrays) if held else opened(arrays)
    if held:
        assert weights(source, 8) == dict.fromkeys(range(13), 1)
    else:
        assert sorted(numbers(source.batch(0, 13))) == list(range(13))
        assert source.examples == 13


def test_arrays_of_bfloat16_are_data():
    x = np.arange(26, dtype=ml_dtypes.bfloat16).reshape(13, 2)
    source = opened({"x": x})
    batch = source.batch(0, 13)["x"]
    assert batch.dtype == ml_dtypes.bfloat16
    assert sorted(batch[:, 0].astype(int).tolist()) == list(range(0, 26, 2))
    assert source.fingerprint != opened({"x": x + 1}).fingerprint


def test_a_source_with_rows_is_asked_for_those_of_the_process():
    class Mine:
        def batch(self, step, size, rows=None):
            self.asked = rows
            chosen = np.arange(step * size, (step + 1) * size)
            return {"inputs": (chosen if rows is None else chosen[rows]).astype(np.float32)[:, None]}

    mine = Mine()
    source = opened(mine)
    assert numbers(source.batch(2, 8, np.array([1, 2]))) == [17, 18]
    assert mine.asked.tolist() == [1, 2]


def weights(source, size):
    seen, index = {}, 0
    while batches := source.evaluation(index, size):
        for each in batches:
            for number in numbers(each.batch):
                seen[number] = round(seen.get(number, 0) + each.weight, 9)
        index += 1
    return {number: weight for number, weight in seen.items() if weight}


@pytest.mark.parametrize("kind", ["dataset", "batches", "function"])
@pytest.mark.parametrize("where", ["method", "object"])
def test_held_out_examples_count_once_wherever_they_come_from(kind, where):
    whole = [example(number) for number in range(13)]

    def batches():
        for begin in range(0, 13, 8):
            part = whole[begin : begin + 8]
            yield {key: np.stack([each[key] for each in part]) for key in part[0]}

    held = {"dataset": Numbered(13), "batches": [*batches()], "function": batches}[kind]

    class Mine:
        def __iter__(self):
            while True:
                yield {"inputs": np.zeros((8, 3), np.float32), "labels": np.zeros((8,), np.int32)}

    if where == "method":
        Mine.evaluation = lambda self: held() if kind == "function" else held
    source = opened(Mine(), held_out=None if where == "method" else held)
    for _ in range(2):
        assert weights(source, 8) == dict.fromkeys(range(13), 1)


class Small(nnx.Module):
    def __init__(self, *, rngs):
        self.layer = nnx.Linear(3, 10, rngs=rngs)

    def __call__(self, x):
        return self.layer(jnp.sin(x))


def stream():
    return grain_stream()


def held():
    return Numbered(13)


JOB = """
[mesh]
simulate = 8
[parallel]
data = 8
[model]
name = "test_user_data:Small"
[data]
source = "test_user_data:stream"
evaluation = "test_user_data:held"
[train]
steps = 6
global_batch = 8
loss = "classify"
eval_every = 3
[optimizer]
decay = "constant"
[checkpoint]
every = 2
[run]
dir = "{folder}"
"""


@pytest.mark.nightly
def test_a_run_on_a_stream_of_grain_is_resumed_bit_for_bit(tmp_path, monkeypatch):
    pytest.importorskip("grain")
    monkeypatch.setattr(stateful, "EVERY", 0.0)
    losses = []
    for name, steps in (("whole", [6]), ("parts", [3, 6])):
        for count in steps:
            job = loads(JOB.format(folder=tmp_path / name), [f"train.steps={count}"], allow_import=True)
            assert not check(job)
            assert (count == 6 and name == "parts") or not (tmp_path / name).exists()  # a check writes no state
            run.train(job, stream=io.StringIO())
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        losses.append([(row["loss"], row.get("eval_loss")) for row in rows])
    assert losses[0] == losses[1]
    assert os.path.getsize(tmp_path / "parts" / "data" / "stream-0of1.jsonl")


WRONG = {
    "an example that is none": (
        lambda: type("None_", (Numbered,), {"__getitem__": lambda self, i: None if i % 3 else example(i)})(),
        "IterDataset",
    ),
    "a list of numbers": (lambda: [1, 2, 3], "a batch is a dict"),
    "an empty dataset": (lambda: Numbered(0), "has no example"),
    "examples of two kinds": (
        lambda: type("Two", (Numbered,), {"__getitem__": lambda self, i: {f"x{i}": 1}})(),
        "same keys",
    ),
    "ragged examples": (
        lambda: type("Ragged", (Numbered,), {"__getitem__": lambda self, i: {"inputs": np.zeros(i + 1)}})(),
        "rows of one shape",
    ),
    "an example that raises": (lambda: type("Gone", (Numbered,), {"__getitem__": lambda self, i: [][i]})(), "[0]"),
    "pairs of a loader": (lambda: [(np.zeros(8), np.zeros(8))], "a tuple of ndarray [8], ndarray [8]"),
    "pairs by number": (
        lambda: type("Pairs", (Numbered,), {"__getitem__": lambda self, i: tuple(example(i).values())})(),
        "{'inputs': x, 'labels': y} for every number",
    ),
    "two arrays": (lambda: (np.zeros((8, 2)), np.zeros(8)), "{'inputs': x, 'labels': y} as the data"),
    "a list of examples": (lambda: [example(i) for i in range(16)], "if this is one example, stack many"),
    "a list of sequences": (lambda: [{"inputs": np.zeros(5), "targets": np.zeros(5)}], "this is one example"),
    "a dict in a batch": (lambda: [{"seen": {"x": np.zeros(8)}}], "seen, a dict of x"),
    "arrays of several lengths": (lambda: {"x": np.zeros(8), "y": np.zeros(9)}, "a dict of x [8], y [9]"),
}


class Raising:
    """A stream whose code breaks at one place."""

    def __init__(self, at):
        self.at, self.drawn = at, 0

    def broken(self, at, value):
        if self.at == at:
            raise RuntimeError(f"the disk of {at}")  # this line is named
        return value

    def __iter__(self):
        return self

    def __next__(self):
        self.drawn += 1
        return {"x": self.broken("array", np.zeros((2,))) if self.at != "array" else Lazy(self)}

    def get_state(self):
        return self.broken("get_state", {"drawn": self.drawn})

    def set_state(self, state):
        self.drawn = self.broken("set_state", state["drawn"])


class Lazy:
    """An array that is made when it is asked for, as tensors of PyTorch's that want gradients refuse to be."""

    shape = (2,)

    def __init__(self, stream):
        self.stream = stream

    def __array__(self, dtype=None, copy=None):
        return self.stream.broken("array", np.zeros(2))


class Named:
    def __init__(self, at):
        self.at = at

    @property
    def fingerprint(self):
        raise RuntimeError(f"the disk of {self.at}")

    def batch(self, step, size):
        return {"x": np.zeros(2)}

    def __len__(self):
        return 2

    def __getitem__(self, number):
        return {"x": np.zeros(2)}


class Dataset(Named):
    batch = None


@pytest.mark.parametrize("at", ["get_state", "set_state", "array", "source", "dataset"])
def test_what_breaks_in_ones_own_code_is_said_with_its_line_and_no_traceback(at, tmp_path, monkeypatch):
    monkeypatch.setattr(stateful, "EVERY", 0.0)

    def read():
        if at in ("source", "dataset"):
            return opened(Named(at) if at == "source" else Dataset(at), tmp_path)
        source = opened(lambda: Raising(at), tmp_path)
        for step in range(3):
            source.batch(step, 2)
        return opened(lambda: Raising(at), tmp_path).batch(3, 2)

    with pytest.raises(JaxparError) as refused:
        read()
    said = refused.value.problems[0].got
    assert f"the disk of {at}" in said
    assert "test_user_data.py, line" in said


@pytest.mark.parametrize("case", WRONG)
def test_what_is_no_data_is_refused(case):
    named, words = WRONG[case]
    with pytest.raises(JaxparError) as error:
        joined(opened(named).batch(step, 8) for step in range(4))
    assert words in str(error.value), str(error.value)
    assert len(error.value.problems) == 1


def test_examples_are_stacked_as_the_error_for_a_list_of_them_says():
    examples = [example(i) for i in range(16)]
    with pytest.raises(JaxparError) as error:
        opened(lambda: examples).batch(0, 8)
    way_out = error.value.problems[0].fix.partition("stack many: ")[2]
    data = eval(way_out, {"np": np, "examples": examples})
    assert set(numbers(opened(data).batch(0, 16))) <= set(range(16))


def test_a_batch_of_another_size_is_no_example():
    with pytest.raises(JaxparError) as error:
        opened(lambda: [{"x": np.zeros((7, 2)), "y": np.zeros(7)}]).batch(0, 8)
    assert error.value.problems[0].fix == "8 rows in every array"


def test_a_generator_that_was_called_is_refused_with_the_name_of_its_function():
    def batches():
        yield {"x": np.zeros(8)}

    with pytest.raises(JaxparError, match=r"batches, not batches\(\)"):
        opened(batches())


class OfHuggingFace(Numbered):
    """As `datasets.Dataset` is: by number, with columns and a method `batch` that is another one than a source's."""

    column_names = ("inputs", "labels")

    def batch(self, batch_size):
        raise AssertionError(batch_size)


OfHuggingFace.__name__, OfHuggingFace.__module__ = "Dataset", "datasets.arrow_dataset"


def test_a_dataset_of_hugging_face_is_read_by_number_and_of_several_splits_one_is_asked_for():
    assert len(numbers(opened(OfHuggingFace()).batch(0, 14))) == 14
    splits = type("DatasetDict", (dict,), {})(train=OfHuggingFace(), test=OfHuggingFace())
    with pytest.raises(JaxparError) as refused:
        opened(splits)
    (problem,) = refused.value.problems
    assert problem.got == "mine:data is a DatasetDict of datasets: train, test"
    assert '["train"]' in problem.fix
    with pytest.raises(JaxparError, match="evaluation is a DatasetDict of datasets"):
        opened(OfHuggingFace(), held_out=splits)
