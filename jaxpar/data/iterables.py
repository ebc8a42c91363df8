"""Batches from the user's Python: an iterable, or an object with `batch(step, size)`."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxpar.data.arrays import to_32_bits
from jaxpar.data.spec import Batch, Rows, WeightedBatch, select_rows
from jaxpar.data.text import weighted_batches
from jaxpar.data.validate import CorruptBatch
from jaxpar.errors import JaxparError, refuse, user_code_errors
from jaxpar.step.shard_batch import check_lists

A_BATCH = "a batch is a dict of arrays"
PAIR = "{'inputs': x, 'labels': y}"
STACK_EXAMPLES = "{key: np.stack([example[key] for example in examples]) for key in examples[0]}"


class Stream:
    """Batches of a user's iterable. To reach a step, it draws and drops the batches before it."""

    def __init__(self, iterable: Iterable, name: str):
        self.iterable, self.fingerprint, self.examples = iterable, name, None
        self._iterator, self._next = None, 0

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        if self._iterator is None or step < self._next:
            self._begin(step)
        return select_rows(as_batch(self._draw(step), size, self.fingerprint), rows)

    def _begin(self, step: int) -> None:
        """Restarts the iterable; a subclass may skip ahead to a state before the step."""
        self._iterator, self._next = iter(self.iterable), 0

    def _draw(self, step: int) -> Any:
        """Draws up to the batch of a step, and returns that batch as the iterable yields it."""
        batch: Any = None
        while self._next <= step:
            self._before_draw()
            with user_code_errors(
                f"{self.fingerprint}, batch {self._next}",
                rule="an iterable has a batch for every step",
                fix="the line that it names",
            ):
                batch = next(self._iterator, None)  # pyright: ignore[reportArgumentType]
            if batch is None:
                raise refuse(
                    f"{self.fingerprint} ended after {self._next} batches, step {step} needs one more",
                    rule="an iterable has a batch for every step, or starts over by itself",
                    fix=f"train.steps = {self._next}, or loop inside it"
                    if self._next
                    else "yield {'inputs': ..., 'targets': ...} for every step",
                )
            self._after_draw(batch)
            self._next += 1
        return batch

    def _before_draw(self) -> None:
        """Hook before a batch is drawn."""

    def _after_draw(self, batch: object) -> None:
        """Hook after a batch was drawn."""

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Always []: an iterable has no held-out examples."""
        return []


class UserSource:
    """A user's object with `batch(step, size)`, whose batches are checked.

    If its `batch` has a parameter `rows`, it is called with the rows of this process alone. It is evaluated if it has
    `evaluation(index, size)`: the index-th group of `size` held-out examples, fewer at the end, then None.
    """

    def __init__(self, source: Any, name: str):
        self.source, self.name = source, name
        self.knows_rows = "rows" in parameters(getattr(source, "batch", None))  # an evaluation set has none
        with user_code_errors(
            name, rule="`fingerprint` of a source tells its data from others", fix="the line that it names"
        ):
            self.fingerprint = str(getattr(source, "fingerprint", name))
            counted = getattr(source, "examples", None)
        self.examples = counted if isinstance(counted, int) else None

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        row_argument = {"rows": rows} if rows is not None and self.knows_rows else {}
        with user_code_errors(
            f"{self.name}.batch({step}, {size})", rule="a source has batch(step, size)", fix="the line that it names"
        ):
            batch = self.source.batch(step, size, **row_argument)
        if rows is not None and row_argument:
            return as_batch(batch, len(rows), self.name)
        return select_rows(as_batch(batch, size, self.name), rows)

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[WeightedBatch]:
        """Returns the user's index-th held-out batch, padded to `size` rows if it has fewer; none after the last."""
        if not hasattr(self.source, "evaluation"):
            return []
        with user_code_errors(
            f"{self.name}.evaluation({index}, {size})",
            rule="a source has evaluation(index, size)",
            fix="the line that it names",
        ):
            batch = self.source.evaluation(index, size)
        if batch is None:
            return []
        count = held_out_count(batch, size)
        arrays = as_batch(batch, count, self.name)
        return weighted_batches(count, size, rows, lambda indices: select_rows(arrays, indices))


def parameters(function: Any) -> Collection[str]:
    """Names of a function's parameters; none if they cannot be inspected."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return ()


def held_out_count(batch: object, size: int) -> int:
    """Returns the number of rows of a user's held-out batch, if all arrays have the same and it is below `size`; else
    `size`.
    """
    counts = {row_count(value) for value in batch.values()} if isinstance(batch, Mapping) else set()
    return min(counts) if len(counts) == 1 and 0 < min(counts) < size else size


def row_count(value: object) -> int:
    if isinstance(value, (list, tuple)):
        return len(value)
    shape = getattr(value, "shape", ())
    return shape[0] if shape else 0


def describe_value(found: object) -> str:
    """Describes a value that should be a dict, for an error: an array by its shape, a short list by its items."""
    if isinstance(found, list | tuple) and 0 < len(found) <= 8:
        return f"a {type(found).__name__} of {', '.join(map(describe_value, found))}"
    shape = getattr(found, "shape", None)
    return f"{found!r:.60}" if shape is None else f"{type(found).__name__} {list(shape)}"


def as_batch(batch: object, size: int, name: str) -> Batch:
    """Converts a user's batch to arrays of numbers in 32 bits.

    Raises:
      CorruptBatch: If it is not a dict of arrays with `size` rows each.
    """
    try:
        return _as_batch(batch, size, name)
    except JaxparError as error:
        raise CorruptBatch(*error.problems) from error


def _as_batch(batch: object, size: int, name: str) -> Batch:
    if not isinstance(batch, Mapping) or not batch:
        pair = isinstance(batch, list | tuple) and len(batch) == 2
        raise refuse(
            f"{name} yields {describe_value(batch)}",
            rule=A_BATCH,
            fix=f"{PAIR}, as lambda: ({PAIR} for x, y in loader)" if pair else _suggest_dict(batch),
        )
    check_lists(batch)
    arrays = {}
    for key, value in batch.items():
        if isinstance(value, Mapping):
            raise refuse(
                f"{name} yields {key}, a dict of {', '.join(map(str, value))}",
                rule=f"{A_BATCH}, and no dict is inside of it",
                fix='flax.traverse_util.flatten_dict(batch, sep="/"), and in the loss unflatten_dict(batch, sep="/")',
            )
        fix = f"np.stack rows of one shape, or leave {key!r} out"
        with user_code_errors(
            f"{name} yields {key}", rule=A_BATCH, fix=fix
        ):  # covers errors of the value's own __array__
            array = to_32_bits(np.asarray(value), f"{name}: {key}")
        if array.dtype.kind not in "biufc" and array.dtype.name != "bfloat16":
            raise refuse(
                f"{name} yields {key} of dtype {array.dtype}",
                rule="a batch holds numbers",
                fix=f"leave {key!r} out, or encode it",
            )
        if array.shape[:1] != (size,):
            raise refuse(
                f"{name} yields {key} of shape {list(array.shape)}, train.global_batch = {size}",
                rule="the first dim of every array is the global batch",
                fix=(f"{size} rows in every array" if array.shape else f"leave {key!r} out") + _suggest_stack(batch),
            )
        arrays[key] = array
    return arrays


def _suggest_dict(batch: object) -> str:
    """Way out for something that is no dict; an array may be one of a pair, which is data but no batches."""
    shape = getattr(batch, "shape", ())
    return f"{PAIR} as the data, if it is arrays x and y" if shape else "yield {'inputs': ..., 'targets': ...}"


def _suggest_stack(batch: Mapping[str, Any]) -> str:
    """Adds the way out if this may be one example in place of a batch; rows of arrays, equally many, are a batch."""
    has_rows = any(isinstance(value, list | tuple) or len(getattr(value, "shape", ())) > 1 for value in batch.values())
    if has_rows and len(set(map(row_count, batch.values()))) == 1:
        return ""
    return f"; or, if this is one example, stack many: {STACK_EXAMPLES}"
