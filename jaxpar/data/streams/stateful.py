"""Streams of batches: any iterable, a DataLoader, grain's `IterDataset`; each process may read its own shard.

def data():                    every process draws global batches, and takes its rows of them
def data(shard, shards):       a process draws its rows alone; processes with the same rows draw the same shard

If an iterator has a state, as grain's and torchdata's have, it is restored when a run resumes. For other iterators the
batches before the step are drawn and dropped, with a message if there are many.
"""

import base64
import hashlib
import inspect
import json
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.iterables import A_BATCH, Stream, as_batch, parameters
from jaxpar.data.spec import Batch, Rows, select_rows
from jaxpar.errors import refuse, user_code_errors
from jaxpar.files import make_folder, partial_path

# Saved states of a stream: a run resumes from the last state before its step, and draws the few batches after it.
#
#     RUN/data/stream-0of2.jsonl     {"next": 128, "state": {...}, "batch": "9d41", "of": "mine:data"}
#                                    {"next": 384, "state": {...}, "batch": "b7c9", "of": "mine:data"}
#
# The state is the one before batch 128 was drawn, with a hash of that batch: so the state of another dataset, or a
# stream that does not repeat, is detected at the first batch.
#
# A line is added every `EVERY` seconds, independent of checkpoints: so any checkpoint, also an older one, has a state
# before it, and no save waits for a stream.

EVERY = 10.0  # seconds between two states
BYTES = "bytes in base64"
MOST_LINES = 4096  # maximum lines; if there are more, every second line of the older half is dropped


class SavedStates:
    """The states of one stream on one process.

    Args:
      file: The file of states.
      stream_name: Name of the stream; states of other streams in the file are ignored.
    """

    def __init__(self, file: Path, stream_name: str):
        self.file, self.stream_name, self._last = file, stream_name, -EVERY
        self._from: int | None = None  # the step that the stream resumed at, until a state is written

    def latest_before(self, step: int) -> tuple[int, Any, str] | None:
        """Returns the newest state at or before a step as (next batch, state, hash of that batch).

        The next `append` deletes states after that step, because they may come from an abandoned run.
        """
        self._from = step
        candidates = [record for record in self._lines() if record["next"] <= step]
        latest = max(candidates, key=lambda record: record["next"], default=None)
        return None if latest is None else (latest["next"], latest["state"], str(latest.get("batch", "")))

    def append(self, index: int, state: object, batch: str) -> bool:
        """Appends the state before batch `index` and the hash of that batch; False if the state is no JSON."""
        try:
            line = json.dumps({"next": index, "state": state, "batch": batch, "of": self.stream_name}, default=_plain)
        except (TypeError, ValueError):
            return False
        make_folder(self.file.parent)
        lines = self._lines()
        records = lines if self._from is None else [item for item in lines if item["next"] <= self._from]
        if len(records) >= MOST_LINES:
            half = len(records) // 2
            records = [*records[:half:2], *records[half:]]
        if len(records) < len(lines):
            partial = partial_path(self.file)
            partial.write_text("".join(json.dumps(item, default=_plain) + "\n" for item in records), encoding="utf-8")
            partial.replace(self.file)
        self._from = None
        with self.file.open("a", encoding="utf-8") as out:
            out.write(line + "\n")
        self._last = time.monotonic()
        return True

    @property
    def is_due(self) -> bool:
        """Whether `EVERY` seconds have passed since the last state."""
        return time.monotonic() - self._last >= EVERY

    def _lines(self) -> list[dict[str, Any]]:
        if not self.file.exists():
            return []
        records = []
        for line in self.file.read_text(encoding="utf-8", errors="replace").splitlines():
            try:
                record = json.loads(line, object_hook=_bytes)
            except ValueError:  # truncated by a kill: the line before it is used
                continue
            if (
                isinstance(record, dict)
                and record.get("of") == self.stream_name
                and isinstance(record.get("next"), int)
            ):
                records.append(record)
        return records


def _plain(value: object) -> Any:
    if isinstance(value, bytes):  # in the state of grain's DataLoader
        return {BYTES: base64.b64encode(value).decode()}
    if isinstance(value, np.generic):
        return value.item()
    raise TypeError(f"{type(value).__name__} is not JSON")


def _bytes(value: dict[str, Any]) -> Any:
    return base64.b64decode(value[BYTES]) if value.keys() == {BYTES} else value


def hash_batch(batch: object) -> str:
    """Hash of a batch; "" if it is no dict."""
    if not isinstance(batch, Mapping):
        return ""
    digest = hashlib.sha256()
    for key in sorted(batch, key=str):
        value = np.asarray(batch[key])
        digest.update(f"{key}{value.shape}{value.dtype}".encode())
        digest.update(value.tobytes())
    return digest.hexdigest()[:16]


MANY = 100  # batches that are drawn and dropped without a message
SAME = "a run goes on with the dataset that it began with, in the same order"
WORDS = (("get_state", "set_state"), ("state_dict", "load_state_dict"))  # grain's, and torchdata's


class Stateful(Stream):
    """Batches of a user's iterable, with its state saved while it is read.

    Args:
      make: Returns the iterable; called with shard and shards if it has these parameters.
      name: Its name in errors.
      folder: Folder of the saved states.
    """

    def __init__(self, make: Callable[..., Iterable], name: str, folder: Path):
        super().__init__((), name)
        self.make, self.folder = make, folder
        self.sharded = {"shard", "shards"} <= set(parameters(make))
        self._shard, self._states, self._owner, self._writes = (0, 1), None, None, True
        self._state, self._wanted = None, ""  # the state before the next batch; the hash that batch must have

    def batch(self, step: int, size: int, rows: Rows = None) -> Batch:
        """Returns the training batch of a step, or some of its rows."""
        shard = find_shard(rows, size, self.fingerprint) if self.sharded else (0, 1)
        self._writes = self.sharded or rows is None or rows[0] == 0  # one of the processes that draw the same batches
        if shard != self._shard:
            self._shard, self._iterator = shard, None
        if self._iterator is None or step < self._next:
            self._begin(step)
        raw, local = self._draw(step), self.sharded and rows is not None
        count = size // shard[1]
        return (
            as_batch(raw, count, self.fingerprint)
            if local
            else select_rows(as_batch(raw, size, self.fingerprint), rows)
        )

    def _begin(self, step: int) -> None:
        shard, shards = self._shard
        with user_code_errors(
            self.fingerprint, rule="a function returns an iterable of batches", fix="the line that it names"
        ):
            iterable = self.make(**({"shard": shard, "shards": shards} if self.sharded else {}))
            self._iterator, self._next = iter(iterable), 0
        # for torchdata the loader, not its iterator, has the state methods
        self._owner = next(
            (candidate for candidate in (self._iterator, iterable) if all(_state_methods(candidate))), None
        )
        self._states, self._wanted = None, ""
        if self._owner is not None:
            self._states = SavedStates(self.folder / f"stream-{shard}of{shards}.jsonl", self.fingerprint)
            self._restore(self._states.latest_before(step), iterable)
        if step - self._next > MANY:
            print(f"{self.fingerprint}: {step - self._next} batches are drawn again, and dropped", file=sys.stderr)

    def _restore(self, found: tuple[int, Any, str] | None, made: Iterable[Any]) -> None:
        """Restores a saved (next batch, state, hash of that batch)."""
        if found is None:
            return
        _, setter = _state_methods(self._owner)
        with user_code_errors(
            f"{self.fingerprint}: its state before batch {found[0]}",
            rule=SAME,
            fix="the dataset as it was, or another run.dir",
        ):
            getattr(self._owner, setter)(found[1])
            if self._owner is made:
                self._iterator = iter(made)
        self._next, self._wanted = found[0], found[2]

    def _before_draw(self) -> None:
        is_due = self._states is not None and self._writes and self._next and not self._wanted and self._states.is_due
        self._state = None
        if is_due:
            getter = _state_methods(self._owner)[0]
            with user_code_errors(
                f"{self.fingerprint}.{getter}() before batch {self._next}",
                rule="a stream tells its state between two batches",
                fix="the line that it names, or an iterator without a state",
            ):
                self._state = getattr(self._owner, getter)()

    def _after_draw(self, batch: object) -> None:
        if self._wanted and self._hash(batch) != self._wanted:
            raise refuse(
                f"{self.fingerprint}: batch {self._next} after its saved state is not the batch that was read then",
                rule=SAME,
                fix="the dataset as it was, or another run.dir",
            )
        self._wanted = ""
        if self._state is None or self._states is None:
            return
        if not self._states.append(self._next, self._state, self._hash(batch)):
            print(f"{self.fingerprint}: its state is no JSON, and is not saved", file=sys.stderr)
            self._states = None

    def _hash(self, batch: object) -> str:
        with user_code_errors(
            f"{self.fingerprint}, batch {self._next}", rule=A_BATCH, fix="np.stack rows of one shape"
        ):
            return hash_batch(batch)


def _state_methods(iterator: object) -> tuple[str, str]:
    """Names of the methods that get and set an iterator's state; "" if it has none."""
    pairs = (pair for pair in WORDS if all(callable(getattr(iterator, method, None)) for method in pair))
    return next(pairs, ("", ""))


def find_shard(rows: Rows, size: int, name: str) -> tuple[int, int]:
    """Returns (shard, number of shards) of these rows of a batch.

    Raises:
      JaxparError: If the rows are not an equal, contiguous share of the batch.
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


def check_loader(loader: object, name: str, *, fresh: bool) -> None:
    """Refuses a PyTorch DataLoader whose order is not reproducible.

    Args:
      loader: The user's iterable.
      name: Its name in errors.
      fresh: Whether a function has just made it.

    Raises:
      JaxparError: If it shuffles without a generator of its own, or is not created anew by a function.
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
