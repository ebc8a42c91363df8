"""What is held out of data of one's own: `evaluation()` of the same object, or another object."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

from jaxpar.data.held_out import weighted
from jaxpar.data.iterables import as_batch, count_of
from jaxpar.data.spec import Batch, Rows, Source, Weighted, some
from jaxpar.data.streams.indexed import Columns, HeldOut
from jaxpar.errors import refuse, users_code


class Evaluated:
    """A source with held-out examples of another's.

    Args:
      source: What is trained on.
      held: What is evaluated on.
    """

    def __init__(self, source: Source, held: Any):
        self.source, self.held = source, held
        self.fingerprint, self.examples = source.fingerprint, source.examples

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        return self.source.batch(step, size, *(() if rows is None else (rows,)))

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th held-out examples; none after the last."""
        return self.held.evaluation(index, size, rows)

    def where(self, step: int, size: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        where = getattr(self.source, "where", None)
        return where(step, size, row) if where else f"batch {step} of {self.fingerprint}"


class Batches:
    """Held-out batches of an iterable, drawn from its beginning for each evaluation; the last one may be smaller.

    Args:
      make: Returns the iterable, anew for each evaluation.
      name: Words for it.
    """

    def __init__(self, make: Callable[[], Iterable], name: str):
        self.make, self.name = make, name
        self._iterator: Iterator = iter(())
        self._next, self._kept = 0, (-1, None)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th batch; none after the last."""
        batch = self._drawn(index)
        if batch is None:
            return []
        count = count_of(batch, size)
        whole = as_batch(batch, count, self.name)
        return weighted(count, size, rows, lambda at: some(whole, at))

    def _drawn(self, index: int) -> Any:
        if self._kept[0] == index:
            return self._kept[1]
        rule = "held-out batches are an iterable of batches"
        with users_code(f"{self.name}, batch {index}", rule=rule, fix="the line that it names"):
            if index < self._next or not self._next:
                self._iterator, self._next = iter(self.make()), 0
            batch = None
            while self._next <= index:
                batch, self._next = next(self._iterator, None), self._next + 1
        self._kept = index, batch
        return batch


def held_out(named: Any, name: str) -> Any:
    """Returns held-out examples of the user's own: a dataset by number, arrays, batches, or what makes one.

    Raises:
      JaxparError: If it is neither.
    """
    make = named
    if callable(named) and not hasattr(named, "__getitem__") and not hasattr(named, "__iter__"):
        rule = "evaluation of no arguments returns a dataset or an iterable of batches"
        with users_code(name, rule=rule, fix="give its arguments defaults"):
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
    return Batches((lambda: named) if make is named else make, name)
