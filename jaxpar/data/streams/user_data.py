"""Opens a user's object as a source, chosen by its methods."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.iterables import UserSource, as_batch, held_out_count, parameters
from jaxpar.data.spec import Batch, Data, Rows, Source, WeightedBatch, select_rows
from jaxpar.data.streams.indexed import Columns, GrainMap, HeldOutRows, Indexed
from jaxpar.data.streams.stateful import Stateful, check_loader
from jaxpar.data.text import weighted_batches
from jaxpar.errors import refuse, user_code_errors

# Held-out examples of the user's own data: `evaluation()` of the same object, or another object.


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
        batch = self._draw_batch(index)
        if batch is None:
            return []
        count = held_out_count(batch, size)
        arrays = as_batch(batch, count, self.name)
        return weighted_batches(count, size, rows, lambda indices: select_rows(arrays, indices))

    def _draw_batch(self, index: int) -> Any:
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
        return HeldOutRows(Columns(named, name), name)
    if hasattr(named, "__getitem__") and hasattr(named, "__len__") and not isinstance(named, list | tuple):
        return HeldOutRows(named, name)
    if (isinstance(named, Iterator) and make is named) or not isinstance(named, Iterable):
        raise refuse(
            f"{name} is a {type(named).__name__}",
            rule="held-out examples are read again for every evaluation: a dataset, or an iterable of batches",
            fix="a list of batches, or a function that returns an iterable",
        )
    return HeldOutBatches((lambda: named) if make is named else make, name)


def open_user_data(spec: Data, named: Any, folder: Path, *, seed: int = 0, held: Any = None) -> Source:
    """Opens a user's object as a source.

    Args:
      spec: The `[data]` table; its `source` names the object.
      named: The object.
      folder: Folder of the saved states of streams.
      seed: Seed of the shuffle of indexed examples.
      held: The object that `data.evaluation` names, or None.

    Raises:
      JaxparError: If it is no source.
    """
    name, data, is_fresh = spec.source, named, False
    if isinstance(named, Iterator):
        function_name = getattr(named, "__name__", "batches")
        raise refuse(
            f"data.source = {name!r} is a {type(named).__name__}, which can be read once",
            rule="a source is read from its start again: to check it, and to resume",
            fix=f"name the function that makes it: {function_name}, not {function_name}()",
        )
    if _is_function(named):
        with user_code_errors(
            f"data.source = {name!r}",
            rule="a function of no arguments returns an iterable of batches; of (shard, shards) one of that shard",
            fix="give its arguments defaults",
        ):
            data, is_fresh = named(**({"shard": 0, "shards": 1} if _takes_shards(named) else {})), True
    if held is None and not _has_batch(data) and callable(getattr(data, "evaluation", None)):
        held = data.evaluation
    if held is not None:
        spec = replace(spec, held_out=0.0)  # other examples are evaluated: none of these would be
    source = _source(spec, named if is_fresh else None, data, folder, seed)
    return (
        source if held is None else WithHeldOut(source, open_held_out(held, spec.evaluation or f"{name}'s evaluation"))
    )


def _source(spec: Data, function: Callable | None, made: object, folder: Path, seed: int) -> Source:
    name = spec.source
    if _has_batch(made):
        return UserSource(made, name)
    if _has_class("grain", made, "MapDataset"):
        return GrainMap(made, name)
    if isinstance(made, Mapping):
        return Indexed(Columns(made, name), name, spec, seed)
    if is_indexed(made):
        return Indexed(made, name, spec, seed)
    if not isinstance(made, Iterable):
        raise refuse(
            f"data.source = {name!r} is a {type(made).__name__}",
            rule="a source is an iterable of batches, a function that returns one, or has batch(step, size)",
            fix="yield {'inputs': ..., 'targets': ...} from a generator function",
        )
    check_loader(made, name, fresh=function is not None)
    return Stateful(function or partial(_identity, made), name, folder)


def is_indexed(made: object) -> bool:
    """Whether an object is a map-style dataset; a list is an iterable of batches instead."""
    return hasattr(made, "__getitem__") and hasattr(made, "__len__") and not isinstance(made, _ITERABLES | type)


_ITERABLES = list | tuple | dict | str | bytes | np.ndarray


def _identity(made: object) -> Any:
    return made


def _has_batch(made: object) -> bool:
    """Whether an object has jaxpar's `batch(step, size)`; grain's and Hugging Face's `batch(size)` are excluded."""
    has_method = callable(getattr(made, "batch", None)) and not isinstance(made, type)
    return has_method and not any(
        _has_class(package, made, kind) for package, kinds in _OTHERS.items() for kind in kinds
    )


_OTHERS = {  # package to its classes with a method `batch(size)`
    "grain": ("MapDataset", "IterDataset"),
    "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
}


def _has_class(package: str, made: object, kind: str) -> bool:
    return any(base.__name__ == kind and base.__module__.startswith(f"{package}.") for base in type(made).__mro__)


def _is_function(named: object) -> bool:
    return callable(named) and not _has_batch(named) and not is_indexed(named) and not isinstance(named, Iterable)


def _takes_shards(function: object) -> bool:
    return {"shard", "shards"} <= set(parameters(function))
