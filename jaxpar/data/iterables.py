"""Batches from the user's own Python: an iterable, or an object with `batch(step, size)`."""

import inspect
from collections.abc import Collection, Iterable, Mapping
from typing import Any

import numpy as np

from jaxpar.data.arrays import in_32_bits
from jaxpar.data.held_out import weighted
from jaxpar.data.spec import Batch, Rows, Weighted, some
from jaxpar.data.validate import CorruptBatch
from jaxpar.errors import JaxparError, refuse, users_code
from jaxpar.step.batch.shard_batch import check_lists

A_BATCH = "a batch is a dict of arrays"
PAIR = "{'inputs': x, 'labels': y}"


class Stream:
    """Batches of the user's own iterable. To reach a step, the batches before it are drawn and dropped."""

    def __init__(self, iterable: Iterable, name: str):
        self.iterable, self.fingerprint, self.examples = iterable, name, None
        self._iterator, self._next = None, 0

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        if self._iterator is None or step < self._next:
            self._begin(step)
        return some(as_batch(self._drawn(step), size, self.fingerprint), rows)

    def _begin(self, step: int) -> None:
        """Sets out to draw the batch of a step."""
        self._iterator, self._next = iter(self.iterable), 0

    def _drawn(self, step: int) -> Any:
        """Returns the batch of a step as the iterable yields it."""
        batch: Any = None
        while self._next <= step:
            self._note()
            with users_code(
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
            self._seen(batch)
            self._next += 1
        return batch

    def _note(self) -> None:
        """Is called before a batch is drawn."""

    def _seen(self, batch: Any) -> None:
        """Is called with a batch that was drawn."""

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns nothing: nothing is held out of an iterable."""
        return []


class Own:
    """The user's own object with `batch(step, size)`, each batch checked.

    With a parameter `rows` in `batch` it is asked for the rows of this process alone. It is evaluated if it has
    `evaluation(index, size)`: the index-th `size` held-out examples, fewer at the end, then None.
    """

    def __init__(self, source: Any, name: str):
        self.source, self.name = source, name
        self.knows_rows = "rows" in parameters(getattr(source, "batch", None))  # an evaluation set has none
        with users_code(
            name, rule="`fingerprint` of a source tells its data from others", fix="the line that it names"
        ):
            self.fingerprint = str(getattr(source, "fingerprint", name))
            counted = getattr(source, "examples", None)
        self.examples = counted if isinstance(counted, int) else None

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step."""
        given = {"rows": rows} if rows is not None and self.knows_rows else {}
        with users_code(
            f"{self.name}.batch({step}, {size})", rule="a source has batch(step, size)", fix="the line that it names"
        ):
            batch = self.source.batch(step, size, **given)
        return as_batch(batch, len(rows), self.name) if given else some(as_batch(batch, size, self.name), rows)  # pyright: ignore

    def evaluation(self, index: int, size: int, rows: Rows = None) -> list[Weighted]:
        """Returns the index-th held-out batch of the user's, which has `size` rows or fewer; none after the last."""
        if not hasattr(self.source, "evaluation"):
            return []
        with users_code(
            f"{self.name}.evaluation({index}, {size})",
            rule="a source has evaluation(index, size)",
            fix="the line that it names",
        ):
            batch = self.source.evaluation(index, size)
        if batch is None:
            return []
        count = count_of(batch, size)
        whole = as_batch(batch, count, self.name)
        return weighted(count, size, rows, lambda at: some(whole, at))


def parameters(function: Any) -> Collection[str]:
    """Returns the names of a function's parameters; none where they are not known."""
    try:
        return inspect.signature(function).parameters
    except (TypeError, ValueError):  # written in C
        return ()


def count_of(batch: Any, size: int) -> int:
    """Returns how many rows all arrays of a user's held-out batch have, if fewer than `size`; else `size`."""
    counts = {rows_of(value) for value in batch.values()} if isinstance(batch, Mapping) else set()
    return min(counts) if len(counts) == 1 and 0 < min(counts) < size else size


def rows_of(value: Any) -> int:
    if isinstance(value, (list, tuple)):
        return len(value)
    shape = getattr(value, "shape", ())
    return shape[0] if shape else 0


def shown(found: Any) -> str:
    """Returns in words what is there in place of a dict: of arrays their shapes, of a list what is in it."""
    if isinstance(found, list | tuple) and 0 < len(found) <= 8:
        return f"a {type(found).__name__} of {', '.join(map(shown, found))}"
    shape = getattr(found, "shape", None)
    return f"{found!r:.60}" if shape is None else f"{type(found).__name__} {list(shape)}"


def as_batch(batch: Any, size: int, name: str) -> Batch:
    """Returns a user's batch as arrays of numbers in 32 bits.

    Raises:
      CorruptBatch: If it is no dict of arrays with `size` rows each.
    """
    try:
        return _as_batch(batch, size, name)
    except JaxparError as error:
        raise CorruptBatch(*error.problems) from error


def _as_batch(batch: Any, size: int, name: str) -> Batch:
    if not isinstance(batch, Mapping) or not batch:
        pair = isinstance(batch, list | tuple) and len(batch) == 2
        raise refuse(
            f"{name} yields {shown(batch)}",
            rule=A_BATCH,
            fix=f"{PAIR}, as lambda: ({PAIR} for x, y in loader)" if pair else "yield {'inputs': ..., 'targets': ...}",
        )
    check_lists(batch)
    made = {}
    for key, value in batch.items():
        if isinstance(value, Mapping):
            raise refuse(
                f"{name} yields {key}, a dict of {', '.join(map(str, value))}",
                rule=f"{A_BATCH}, and no dict is inside of it",
                fix='flax.traverse_util.flatten_dict(batch, sep="/"), and in the loss unflatten_dict(batch, sep="/")',
            )
        fix = f"np.stack rows of one shape, or leave {key!r} out"
        with users_code(f"{name} yields {key}", rule=A_BATCH, fix=fix):  # also what its own __array__ raises
            array = in_32_bits(np.asarray(value), f"{name}: {key}")
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
                fix=f"{size} rows in every array" if array.shape else f"leave {key!r} out",
            )
        made[key] = array
    return made
