"""Examples of the user's own that are read by number: a sequence, a map-style dataset, grain's `MapDataset`.

    position ─► number of an example ─► dataset[number] ─► stacked with the others of its batch

Only the rows of this process are read. A `MapDataset` of grain has its own order, epochs and random transformations, by
numbers that go on without end; of others jaxpar makes the order.
"""

import hashlib
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np

from jaxpar.data.examples import Examples
from jaxpar.data.held_out import weighted
from jaxpar.data.iterables import PAIR, as_batch, shown
from jaxpar.data.spec import Batch, Data, Rows, Weighted
from jaxpar.errors import refuse, users_code

COLUMNS = "data that is a dict has arrays with a row for every example"
WORDS = "{'inputs': ..., 'targets': ...}"


class Indexed(Examples):
    """A sequence of examples, dicts of arrays; some are held out.

    Args:
      dataset: Has a length, and examples by number.
      name: Words for it.
      spec: The `[data]` table.
      seed: Of their order.
    """

    def __init__(self, dataset: Any, name: str, spec: Data, seed: int):
        self.dataset, self.name = dataset, name
        self.fingerprint = fingerprint(dataset, name)
        super().__init__(_length(dataset, name), spec, seed)

    def _rows(self, chosen: np.ndarray) -> Batch:
        return read(self.dataset, chosen, self.name)


class Columns:
    """A dict of arrays as a map-style dataset: row i of each belongs to example i.

    Args:
      arrays: Name to array.
      name: Words for it.

    Raises:
      JaxparError: If they are no arrays, have other rows, or are datasets themselves.
    """

    def __init__(self, arrays: Mapping[str, Any], name: str):
        if splits := [str(key) for key, value in arrays.items() if hasattr(value, "column_names")]:  # Hugging Face's
            raise refuse(
                f"{name} is a {type(arrays).__name__} of datasets: {', '.join(splits)}",
                rule="a run trains on one dataset, and may evaluate on another",
                fix=f'one of them: its ["{splits[0]}"]',
            )
        self.arrays: dict[str, np.ndarray] = {}
        for key, value in arrays.items():
            with users_code(f"{name}: {key}", rule=COLUMNS, fix="np.stack rows of one shape"):
                self.arrays[key] = np.asarray(value)
        counts = {key: len(value) if value.ndim else 0 for key, value in self.arrays.items()}
        if len({*counts.values()}) > 1 or not all(counts.values()):
            said = ", ".join(f"{key} {list(value.shape)}" for key, value in self.arrays.items())
            raise refuse(f"{name} is a dict of {said}", rule=COLUMNS, fix="as many rows in every array")
        self.count = min(counts.values(), default=0)

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, number: Any) -> dict[str, Any]:
        """Returns an example, or of an array of numbers those examples, stacked."""
        return {key: value[number] for key, value in self.arrays.items()}


class GrainMap:
    """A `MapDataset` of grain's, in its own order. Nothing is held out of it: that is another dataset.

    Args:
      dataset: The dataset.
      name: Words for it.
    """

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name = dataset, name
        self.fingerprint = fingerprint(dataset, name)
        length = _length(dataset, name)
        self.examples = length if length < sys.maxsize else None  # it repeats without end

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        positions = np.arange(step * size, (step + 1) * size)
        return read(self.dataset, positions if rows is None else positions[rows], self.name)

    def where(self, step: int, size: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        return f"{self.name}[{step * size + row}]"

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns nothing: nothing is held out of it."""
        return []


class HeldOut:
    """Held-out examples of the user's own, by number."""

    def __init__(self, dataset: Any, name: str):
        self.dataset, self.name, self.length = dataset, name, _length(dataset, name)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th `size` examples; none after the last."""
        chosen = np.arange(index * size, min((index + 1) * size, self.length))
        return weighted(len(chosen), size, rows, lambda at: read(self.dataset, chosen[at], self.name))


def read(dataset: Any, chosen: np.ndarray, name: str) -> Batch:
    """Returns examples by their numbers, stacked.

    Raises:
      CorruptBatch: If an example is no dict of arrays, or they do not fit together.
    """
    if isinstance(dataset, Columns):
        return as_batch(dataset[chosen], len(chosen), name)
    found = []
    for number in chosen.tolist():
        with users_code(f"{name}[{number}]", rule="a dataset has every example", fix="the line that it names"):
            found.append(dataset[number])
    first = found[0]
    for number, each in zip(chosen.tolist(), found, strict=True):
        if not isinstance(each, Mapping) or each.keys() != first.keys():
            left_out, pair = each is None, isinstance(each, list | tuple) and len(each) == 2
            got = f"a dict of {', '.join(map(str, each))}" if isinstance(each, Mapping) else shown(each)
            raise refuse(
                f"{name}[{number}] is {got}",
                rule="an example is a dict of arrays, and all have the same keys",
                fix="filter in an IterDataset: dataset.to_iter_dataset().filter(...).batch(...)"
                if left_out
                else f"{PAIR if pair else WORDS} for every number",
            )
    made = {key: [each[key] for each in found] for key in first}
    return as_batch({key: _stacked(values) for key, values in made.items()}, len(found), name)


def _stacked(values: list[Any]) -> Any:
    arrays = [np.asarray(value) for value in values]
    return np.stack(arrays) if len({each.shape for each in arrays}) == 1 else values


def fingerprint(dataset: Any, name: str) -> str:
    """Returns the name of a dataset, its length, and a hash of its first example: what tells it from others."""
    with users_code(name, rule="`fingerprint` of a dataset tells it from others", fix="the line that it names"):
        said = getattr(dataset, "fingerprint", None)
    if isinstance(said, str):
        return said
    length = _length(dataset, name)
    first = read(dataset, np.array([0]), name)
    digest = hashlib.sha256()
    for key, value in sorted(first.items()):
        digest.update(f"{key}{value.shape}{value.dtype}".encode())
        digest.update(np.ascontiguousarray(value).data)
    return f"{name} of {length} {digest.hexdigest()[:16]}"


def _length(dataset: Any, name: str) -> int:
    with users_code(f"len({name})", rule="a dataset has a length", fix="the line that it names"):
        length = len(dataset)
    if not length:
        raise refuse(f"{name} has no example", rule="a dataset has at least one example", fix="another dataset")
    return length
