"""Streams of batches: any iterable, a DataLoader, grain's `IterDataset`; each process may read a shard of its own.

def data():                    every process draws whole batches, and takes its rows of them
def data(shard, shards):       a process draws batches of its own rows: those with the same rows the same shard

Iterators that tell their state, as grain's and torchdata's do, are set to it where a run goes on; of others the batches
before the step are drawn and dropped, with a word if they are many.
"""

import inspect
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.iterables import A_BATCH, Stream, as_batch, parameters
from jaxpar.data.spec import Batch, Rows, some
from jaxpar.data.streams.states import States, hash_of
from jaxpar.errors import refuse, users_code

MANY = 100  # batches that are drawn and dropped without a word
SAME = "a run goes on with the dataset that it began with, in the same order"
WORDS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # grain's, and torchdata's


class Stateful(Stream):
    """Batches of the user's own iterable.

    Args:
      make: Returns the iterable; of (shard, shards), if it has these parameters.
      name: Words for it.
      folder: Where states are written.
    """

    def __init__(self, make: Callable[..., Iterable], name: str, folder: Path):
        super().__init__((), name)
        self.make, self.folder = make, folder
        self.sharded = {"shard", "shards"} <= set(parameters(make))
        self._shard, self._states, self._owner, self._writes = (0, 1), None, None, True
        self._state, self._wanted = None, ""  # before the batch that is drawn; the hash that it must have

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, or some of its rows."""
        shard = shard_of(rows, size, self.fingerprint) if self.sharded else (0, 1)
        self._writes = self.sharded or rows is None or rows[0] == 0  # of those that draw the same batches one writes
        if shard != self._shard:
            self._shard, self._iterator = shard, None
        if self._iterator is None or step < self._next:
            self._begin(step)
        drawn, own = self._drawn(step), self.sharded and rows is not None
        count = size // shard[1]
        return as_batch(drawn, count, self.fingerprint) if own else some(as_batch(drawn, size, self.fingerprint), rows)

    def _begin(self, step: int) -> None:
        shard, shards = self._shard
        with users_code(
            self.fingerprint, rule="a function returns an iterable of batches", fix="the line that it names"
        ):
            made = self.make(**({"shard": shard, "shards": shards} if self.sharded else {}))
            self._iterator, self._next = iter(made), 0
        # torchdata's loaders tell the state of their iterators
        self._owner = next((each for each in (self._iterator, made) if all(_words(each))), None)
        self._states, self._wanted = None, ""
        if self._owner is not None:
            self._states = States(self.folder / f"stream-{shard}of{shards}.jsonl", self.fingerprint)
            self._set(self._states.before(step), made)
        if step - self._next > MANY:
            print(f"{self.fingerprint}: {step - self._next} batches are drawn again, and dropped", file=sys.stderr)

    def _set(self, found: tuple[int, Any, str] | None, made: Any) -> None:
        """Sets the stream to a state that was noted."""
        if found is None:
            return
        _, put = _words(self._owner)
        with users_code(
            f"{self.fingerprint}: its state before batch {found[0]}",
            rule=SAME,
            fix="the dataset as it was, or another run.dir",
        ):
            getattr(self._owner, put)(found[1])
            if self._owner is made:
                self._iterator = iter(made)
        self._next, self._wanted = found[0], found[2]

    def _note(self) -> None:
        due = self._states is not None and self._writes and self._next and not self._wanted and self._states.is_due
        self._state = None
        if due:
            word = _words(self._owner)[0]
            with users_code(
                f"{self.fingerprint}.{word}() before batch {self._next}",
                rule="a stream tells its state between two batches",
                fix="the line that it names, or an iterator without a state",
            ):
                self._state = getattr(self._owner, word)()

    def _seen(self, batch: Any) -> None:
        if self._wanted and self._hash(batch) != self._wanted:
            raise refuse(
                f"{self.fingerprint}: batch {self._next} after its state is another than that which was read",
                rule=SAME,
                fix="the dataset as it was, or another run.dir",
            )
        self._wanted = ""
        if self._state is None or self._states is None:
            return
        if not self._states.note(self._next, self._state, self._hash(batch)):
            print(f"{self.fingerprint}: its state is no JSON, and is not kept", file=sys.stderr)
            self._states = None

    def _hash(self, batch: Any) -> str:
        with users_code(f"{self.fingerprint}, batch {self._next}", rule=A_BATCH, fix="np.stack rows of one shape"):
            return hash_of(batch)


def _words(iterator: Any) -> tuple[str, str]:
    """Returns the names of the methods that tell and set a state; "" where there are none."""
    found = (pair for pair in WORDS if all(callable(getattr(iterator, word, None)) for word in pair))
    return next(found, ("", ""))


def shard_of(rows: Rows, size: int, name: str) -> tuple[int, int]:
    """Returns the shard that has these rows of a batch, and of how many.

    Raises:
      JaxparError: If the rows are no such share of the batch.
    """
    if rows is None:
        return 0, 1
    count, first = len(rows), int(rows[0])
    if size % count or first % count or not np.array_equal(rows, np.arange(first, first + count)):
        raise refuse(
            f"{name} in shards, and a process has rows {rows.tolist()[:8]} of {size}",
            rule="a shard is an equal, connected share of the batch",
            fix="batch(step, size, rows), or processes in the order of the batch",
        )
    return first // count, size // count


def check_loader(loader: Any, name: str, *, fresh: bool) -> None:
    """Refuses a DataLoader of PyTorch's whose order nobody could repeat.

    Args:
      loader: The user's iterable.
      name: Words for it.
      fresh: Whether a function has just made it.

    Raises:
      JaxparError: If it shuffles without a generator of its own, or with one that is not made anew.
    """
    sampler = getattr(loader, "sampler", None)
    if type(sampler).__name__ != "RandomSampler" or not inspect.getmodule(type(loader)):
        return
    if not type(loader).__module__.startswith(("torch.", "torchdata.")):
        return
    if getattr(sampler, "generator", None) is None or not fresh:
        raise refuse(
            f"{name} shuffles "
            + ("by PyTorch's global generator" if fresh else "in another order each time it is read"),
            rule="a run that goes on reads the batches that it would have read",
            fix="a function that returns DataLoader(..., generator=torch.Generator().manual_seed(0))",
        )
