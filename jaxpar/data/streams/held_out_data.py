"""Held-out examples of the user's own data: `evaluation()` of the same object, or another object."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxpar.data.held_out import weighted_batches
from jaxpar.data.iterables import as_batch, held_out_count
from jaxpar.data.spec import Batch, Rows, Source, WeightedBatch, select_rows
from jaxpar.data.streams.indexed import Columns, HeldOut
from jaxpar.errors import refuse, user_code_errors


class WithHeldOut:
    """Combines a training source with separate held-out examples.

    Args:
      source: The training source.
      held_out: The held-out examples.
    """

    def __init__(self, source: Source, held: Any):
        self.source, self.held_out = source, held
        self.fingerprint, self.examples = source.fingerprint, source.examples

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        return self.source.batch(step, size, *(() if rows is None else (rows,)))

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th group of held-out examples; none after the last."""
        return self.held_out.evaluation(index, size, rows)

    def where(self, step: int, size: int, row: int) -> str:
        """Describes where a row of a training batch comes from."""
        where = getattr(self.source, "where", None)
        return where(step, size, row) if where else f"batch {step} of {self.fingerprint}"


class HeldOutBatches:
    """Held-out batches of an iterable, drawn from its beginning for each evaluation; the last one may be smaller.

    Args:
      make: Returns a new iterable for each evaluation.
      name: Its name in errors.
    """

    def __init__(self, make: Callable[[], Iterable], name: str):
        self.make, self.name = make, name
        self._iterator: Iterator = iter(())
        self._next, self._kept = 0, (-1, None)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the index-th batch; none after the last."""
        batch = self._drawn(index)
        if batch is None:
            return []
        count = held_out_count(batch, size)
        arrays = as_batch(batch, count, self.name)
        return weighted_batches(count, size, rows, lambda indices: select_rows(arrays, indices))

    def _drawn(self, index: int) -> Any:
        if self._kept[0] == index:
            return self._kept[1]
        rule = "held-out batches are an iterable of batches"
        with user_code_errors(f"{self.name}, batch {index}", rule=rule, fix="the line that it names"):
            if index < self._next or not self._next:
                self._iterator, self._next = iter(self.make()), 0
            batch = None
            while self._next <= index:
                batch, self._next = next(self._iterator, None), self._next + 1
        self._kept = index, batch
        return batch


def open_held_out(named: Any, name: str) -> Any:
    """Wraps a user's held-out examples: a map-style dataset, arrays, batches, or a function that returns one.

    Raises:
      JaxparError: If it is none of these.
    """
    make = named
    if callable(named) and not hasattr(named, "__getitem__") and not hasattr(named, "__iter__"):
        rule = "evaluation of no arguments returns a dataset or an iterable of batches"
        with user_code_errors(name, rule=rule, fix="give its arguments defaults"):
            named = named()
    if isinstance(named, Mapping):
        return HeldOut(Columns(named, name), name)
    if hasattr(named, "__getitem__") and hasattr(named, "__len__") and not isinstance(named, list | tuple):
        return HeldOut(named, name)
    if (isinstance(named, Iterator) and make is named) or not isinstance(named, Iterable):
        raise refuse(
            f"{name} is a {type(named).__name__}",
            rule="held-out examples are read again for every evaluation: a dataset, or an iterable of batches",
            fix="a list of batches, or a function that returns an iterable",
        )
    return HeldOutBatches((lambda: named) if make is named else make, name)
