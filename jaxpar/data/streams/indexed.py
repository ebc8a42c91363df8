"""A user's indexed examples: a sequence, a map-style dataset, grain's `MapDataset`.

    position ─► number of an example ─► dataset[number] ─► stacked with the others of its batch

Only the rows of this process are read. A grain `MapDataset` has its own order, epochs and random transformations, under
indices without end; other datasets are shuffled by jaxpar.
"""

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpar.data.iterables import PAIR, as_batch, describe_value
from jaxpar.data.spec import Batch, Data, Rows, WeightedBatch
from jaxpar.data.text import Examples, weighted_batches
from jaxpar.errors import refuse, user_code_errors

COLUMNS = "data that is a dict has arrays with a row for every example"
WORDS = "{'inputs': ..., 'targets': ...}"


class Indexed(Examples):
    """A map-style dataset of dicts of arrays, a share of it held out.

    Args:
      dataset: Has `__len__` and `__getitem__`.
      name: Its name in errors.
      spec: The `[data]` table.
      seed: Seed of the shuffle.
    """

    def __init__(self, dataset: object, name: str, spec: Data, seed: int):
        self.dataset, self.name = dataset, name
        self.fingerprint = fingerprint(dataset, name)
        super().__init__(_length(dataset, name), spec, seed)

    def _rows(self, chosen: np.ndarray) -> Batch:
        return read(self.dataset, chosen, self.name)


class Columns:
    """A dict of arrays as a map-style dataset: row i of each belongs to example i.

    Args:
      arrays: Arrays by name.
      name: Its name in errors.

    Raises:
      JaxparError: If they are no arrays, differ in their number of rows, or are datasets themselves.
    """

    def __init__(self, arrays: Mapping[str, object], name: str):
        if splits := [str(key) for key, value in arrays.items() if hasattr(value, "column_names")]:  # Hugging Face's
            raise refuse(
                f"{name} is a {type(arrays).__name__} of datasets: {', '.join(splits)}",
                rule="a run trains on one dataset, and may evaluate on another",
                fix=f'one of them: its ["{splits[0]}"]',
            )
        self.arrays: dict[str, np.ndarray] = {}
        for key, value in arrays.items():
            with user_code_errors(f"{name}: {key}", rule=COLUMNS, fix="np.stack rows of one shape"):
                self.arrays[key] = np.asarray(value)
        counts = {key: len(value) if value.ndim else 0 for key, value in self.arrays.items()}
        if len({*counts.values()}) > 1 or not all(counts.values()):
            shapes = ", ".join(f"{key} {list(value.shape)}" for key, value in self.arrays.items())
            raise refuse(f"{name} is a dict of {shapes}", rule=COLUMNS, fix="as many rows in every array")
        self.count = min(counts.values(), default=0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: int | np.ndarray) -> dict[str, Any]:
        """Returns an example, or for an array of indices those examples, stacked."""
        return {key: value[number] for key, value in self.arrays.items()}


class GrainMap:
    """A grain `MapDataset`, in its own order. It has no held-out examples: these are another dataset.

    Args:
      dataset: The dataset.
      name: Its name in errors.
    """

    def __init__(self, dataset: object, name: str):
        self.dataset, self.name = dataset, name
        self.fingerprint = fingerprint(dataset, name)
        length = _length(dataset, name)
        self.examples = length if length < sys.maxsize else None  # it repeats without end

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        positions = np.arange(step * size, (step + 1) * size)
        return read(self.dataset, positions if rows is None else positions[rows], self.name)

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        return f"{self.name}[{step * size + row}]"

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Always []: no examples are held out."""
        return []


class HeldOutRows:
    """A user's map-style dataset of held-out examples."""

    def __init__(self, dataset: object, name: str):
        self.dataset, self.name, self.length = dataset, name, _length(dataset, name)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of `size` examples; none after the last."""
        chosen = np.arange(index * size, min((index + 1) * size, self.length))
        return weighted_batches(len(chosen), size, rows, lambda indices: read(self.dataset, chosen[indices], self.name))


def read(dataset: Any, chosen: np.ndarray, name: str) -> Batch:
    """Reads examples by index and stacks them.

    Raises:
      CorruptBatch: If examples cannot be stacked into arrays of numbers.
      JaxparError: If an example is no dict, or its keys differ from those of the first.
    """
    if isinstance(dataset, Columns):
        return as_batch(dataset[chosen], len(chosen), name)
    examples = []
    for number in chosen.tolist():
        with user_code_errors(f"{name}[{number}]", rule="a dataset has every example", fix="the line that it names"):
            examples.append(dataset[number])
    first = examples[0]
    for number, example in zip(chosen.tolist(), examples, strict=True):
        if not isinstance(example, Mapping) or example.keys() != first.keys():
            is_none, pair = example is None, isinstance(example, list | tuple) and len(example) == 2
            got = (
                f"a dict of {', '.join(map(str, example))}" if isinstance(example, Mapping) else describe_value(example)
            )
            raise refuse(
                f"{name}[{number}] is {got}",
                rule="an example is a dict of arrays, and all have the same keys",
                fix="filter in an IterDataset: dataset.to_iter_dataset().filter(...).batch(...)"
                if is_none
                else f"{PAIR if pair else WORDS} for every number",
            )
    columns = {key: [example[key] for example in examples] for key in first}
    return as_batch({key: _stack(values) for key, values in columns.items()}, len(examples), name)


def _stack(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    return np.stack(arrays) if len({array.shape for array in arrays}) == 1 else values


def fingerprint(dataset: object, name: str) -> str:
    """The dataset's own `fingerprint`, or else its name, its length and a hash of its first example."""
    with user_code_errors(name, rule="`fingerprint` of a dataset tells it from others", fix="the line that it names"):
        declared = getattr(dataset, "fingerprint", None)
    if isinstance(declared, str):
        return declared
    length = _length(dataset, name)
    first = read(dataset, np.array([0]), name)
    digest = hashlib.sha256()
    for key, value in sorted(first.items()):
        digest.update(f"{key}{value.shape}{value.dtype}".encode())
        digest.update(value.tobytes())  # bfloat16 has no buffer of its own
    return f"{name} of {length} {digest.hexdigest()[:16]}"


def _length(dataset: Any, name: str) -> int:
    with user_code_errors(f"len({name})", rule="a dataset has a length", fix="the line that it names"):
        length = len(dataset)
    if not length:
        raise refuse(f"{name} has no example", rule="a dataset has at least one example", fix="another dataset")
    return length
