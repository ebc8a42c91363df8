"""The input pipeline: reads the batch of a step, checks it, skips bad batches, and places each process's rows.

    step ─► draws ─► batch of the source ─► check values ─► rows of this process ─► global arrays
                       ▲                          │ corrupt, and the job skips corrupt batches
                       └───── next batch ◄────────┘

The batch of a step is a pure function of the step and of RUN/skipped_batches.json, so a run can resume at any step.
The host reads batches while the devices compute, and measures how long each step waits for its batch:

    data.ahead = 0   the host reads the batch of a step while the devices compute the step before
    data.ahead = 4   thread    read 5 | read 6 | read 7 (slow) ........... | read 8
                     devices   step 3 | step 4 | step 5 | step 6           | step 7 waits only if no batch is left

Reading ahead changes when a batch is read, not which batch: losses are equal bit for bit with and without it.
"""

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from copy import copy
from dataclasses import replace
from functools import partial
from types import TracebackType
from typing import Any

import jax
import numpy as np

from jaxpar.data.spec import Batch, Rows, Source, WeightedBatch, select_rows
from jaxpar.data.streams.sets import EvaluationSet
from jaxpar.data.validate import BatchSpec, CorruptBatch
from jaxpar.errors import JaxparError, refuse
from jaxpar.optim.optimizer import Growth
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.state_specs import batch_sharding
from jaxpar.train.faults import Faults, SkippedBatches
from jaxpar.train.incomplete_batches import Incomplete


class Feed:
    """The batches of a run, checked and placed on the devices of a layout.

    Args:
      source: The source of the batches.
      layout: The layout whose devices receive the batches.
      size: Examples per global batch; in the first phase, if the batch grows.
      growth: The phases of a growing batch.
      good: The check that batches must pass; None checks none.
      skipped: The batches that the run skips; None if it cannot skip any.
      faults: The reaction to a corrupt batch.
      say: Prints a line for the user, e.g. that a batch is skipped.
    """

    def __init__(
        self,
        source: Source,
        layout: Layout,
        size: int,
        *,
        good: BatchSpec | None = None,
        skipped: SkippedBatches | None = None,
        faults: Faults | None = None,
        growth: Growth | None = None,
        say: Callable[[str], None] = lambda _: None,
    ):
        self.source: Any = source
        self.layout, self.size = layout, size
        self.good, self.skipped, self.faults, self.say = good, skipped, faults or Faults(), say
        self.growth = growth or Growth()
        self._skips = skipped is not None and self.faults.on_bad_batch == "skip"
        self.rows: Rows = rows_here(layout, size) if jax.process_count() > 1 else None
        self._one = threading.Lock()  # a thread may read ahead, and sources need not be thread-safe
        self._evaluation_feeds: dict[str, Feed] = {}
        self._bad_out: list[int] = []  # sorted indices of corrupt held-out batches
        self.incomplete = Incomplete()

    def evaluation_feed(self, name: str, held_out: EvaluationSet) -> "Feed":
        """Returns the feed of an evaluation set, with the same layout and batch size."""
        if name not in self._evaluation_feeds:
            feed = self._evaluation_feeds[name] = copy(self)
            feed.source, feed._bad_out, feed.incomplete = held_out, [], Incomplete(name)
        return self._evaluation_feeds[name]

    def batch(self, step: int) -> Mapping[str, Any]:
        """Returns the training batch of a step: host arrays in a single process, global `jax.Array`s in several.

        Raises:
          JaxparError: If the batch is corrupt and the job does not skip corrupt batches, or too many follow in a row.
        """
        return self.to_global_arrays(self.read(step))

    def evaluation(self, index: int) -> list[WeightedBatch]:
        """Returns the index-th held-out batch, not counting corrupt ones, as weighted batches; empty after the last.

        Raises:
          JaxparError: If the batch is corrupt and the job does not skip corrupt batches.
        """
        return [replace(item, batch=self.to_global_arrays(item.batch)) for item in self.read_evaluation(index)]

    def read(self, step: int) -> Batch:
        """Returns this process's rows of the training batch of a step, on the host."""
        with self._one:
            return interleave([self._draw(draw, step) for draw in self.growth.draws(step)])

    def _draw(self, draw: int, step: int) -> Batch:
        """Returns this process's rows of one draw; a step of a grown batch takes several draws."""
        passed: list[CorruptBatch] = []
        while True:
            index = draw if self.skipped is None else self.skipped.batch_index(draw)
            try:
                batch = self.source.batch(index, self.size, *self._wanted_rows())
                if self.good is not None:
                    self.good.check(batch, partial(_position, self.source, self.size, index), *self._wanted_rows())
                return select_rows(batch, self.rows) if self._skips else batch
            except CorruptBatch as error:
                skipped = _skip_batch(self, f"the batch of step {step + 1}", error, passed)
                skipped.skip(draw, error.problems[0].got)

    def read_evaluation(self, index: int) -> list[WeightedBatch]:
        """Returns this process's rows of the index-th held-out batch, on the host."""
        with self._one:
            passed: list[CorruptBatch] = []
            while True:
                position = index
                for bad in self._bad_out:
                    position += bad <= position
                try:
                    # a user's source may return None instead of an empty list
                    batches = self.source.evaluation(position, self.size, *self._wanted_rows()) or []
                    for item in batches:
                        if self.good is not None:
                            self.good.check(
                                item.batch, lambda _, at=position: f"held-out batch {at}", *self._wanted_rows()
                            )
                    rows = self.rows if self._skips else None  # of this process, if it has read those of all
                    return [replace(item, batch=select_rows(item.batch, rows)) for item in batches]
                except CorruptBatch as error:
                    _skip_batch(self, "a held-out batch", error, passed)
                    self._bad_out = sorted([*self._bad_out, position])

    def rearrange(self, index: int, rows: np.ndarray) -> Mapping[str, Any]:
        """Returns the given rows of the index-th (padded) held-out batch, as `to_global_arrays` does.

        Args:
          index: Index of the batch.
          rows: Global row numbers, in order; a row may occur several times.
        """
        if self.rows is None:
            return select_rows(self.read_evaluation(index)[0].batch, rows)
        part, local_rows = copy(self), rows_here(self.layout, len(rows))
        part.rows = rows[local_rows]
        batch = part.read_evaluation(index)[0].batch
        part.rows, part.size = local_rows, len(rows)
        return part.to_global_arrays(batch)

    def _wanted_rows(self) -> tuple[np.ndarray, ...]:
        """Returns the rows to read as an extra argument of the source; () for all, as simple sources do not have it."""
        # all processes must skip the same corrupt batches: each reads all rows
        return () if self._skips or self.rows is None else (self.rows,)

    def to_global_arrays(self, batch: Batch) -> dict[str, Any]:
        """Assembles the rows of all processes into global arrays; in a single process, the step places the batch."""
        if self.rows is None:
            return batch
        return {name: _global_array(self.layout, self.size, self.rows, value) for name, value in batch.items()}


def _skip_batch(feed: Feed, what: str, error: CorruptBatch, passed: list[CorruptBatch]) -> SkippedBatches:
    """Reports a skipped batch. Raises if the job does not allow skipping, or too many were skipped in a row."""
    problem = error.problems[0]
    got = f"{what} is corrupt: {problem.got}"
    if feed.skipped is None or not feed._skips:
        skip = "" if feed.skipped is None else "; or faults.on_bad_batch = 'skip'"
        raise refuse(got, rule=problem.rule, fix=problem.fix + skip) from error
    passed.append(error)
    if len(passed) > feed.faults.skips:
        raise refuse(
            f"{len(passed)} corrupt batches one after the other, the last: {problem.got}",
            rule=f"faults.skips = {feed.faults.skips} may be skipped in a row",
            fix=problem.fix,
        ) from error
    feed.say(f"{got}; passed over")
    return feed.skipped


def _global_array(layout: Layout, size: int, local_rows: Any, value: np.ndarray) -> jax.Array:
    """Returns the global array [size * draws, ...] from this process's rows of merged draws."""
    times = len(value) // len(local_rows)
    rows, size = (local_rows[:, None] * times + np.arange(times)).ravel(), size * times
    shape = (size, *value.shape[1:])

    def shard(index):
        begin, end, _ = index[0].indices(size)
        offset = np.searchsorted(rows, begin)
        return value[(slice(offset, offset + end - begin), *index[1:])]

    value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
    return jax.make_array_from_callback(shape, batch_sharding(layout, shape), shard)


class Reader:
    """Reads the batches of consecutive steps, optionally ahead of time.

    Args:
      feed: Reads and places the batches.
      ahead: Number of batches that a thread reads ahead; 0 starts no thread.
      last: The last step of the run; no batch beyond it is read.
      kept: Number of newest batches that `describe_batch` knows; 0 keeps none in memory.
    """

    def __init__(self, feed: Feed, *, ahead: int, last: int, kept: int = 0):
        self.feed, self.ahead, self.last = feed, ahead, last
        self._pool = ThreadPoolExecutor(1, "batches") if ahead else None
        self._wanted_rows: dict[int, Future] = {}
        self._recent: deque[tuple[int, Batch]] = deque(maxlen=kept)

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:  # after a rollback a new Reader reads: wait for reads in progress
            self._pool.shutdown(wait=kind is not None and issubclass(kind, JaxparError), cancel_futures=True)

    def batch(self, step: int, last_metrics: Mapping[str, object] | None) -> tuple[Mapping[str, Any], float]:
        """Returns the batch of a step, and the seconds that the devices waited for it.

        The seconds are the host's waiting time if the step before has finished by then, otherwise 0. They are an upper
        bound, as the step before may have finished during the wait.

        Args:
          step: The step, from 0; it must grow by 1 from call to call.
          last_metrics: The metrics of the step before, if that is still in flight.

        Raises:
          JaxparError: If reading the batch raised it.
        """
        began = time.perf_counter()
        read = self._read(step)
        self._recent.append((step, read))
        batch = self.feed.to_global_arrays(read)
        waited = time.perf_counter() - began
        arrays = [value for value in (last_metrics or {}).values() if isinstance(value, jax.Array)]
        done = all(array.is_ready() for array in arrays)  # pyright: ignore[reportAttributeAccessIssue]
        return batch, waited if done else 0.0

    def describe_batch(self, step: int) -> str:
        """Returns the first number of each array that is not finite in the batch of a step, from 0.

        It is empty if all numbers are finite, or the batch is no longer kept. A process describes its own rows.
        """
        batches = [batch for number, batch in self._recent if number == step]
        return _describe_nonfinite(self.feed, step, batches[-1]) if batches else ""

    def _read(self, step: int) -> Any:
        if self._pool is None:
            return self.feed.read(step)
        for index in range(step, min(step + 1 + self.ahead, self.last)):
            if index not in self._wanted_rows:
                self._wanted_rows[index] = self._pool.submit(self.feed.read, index)
        return self._wanted_rows.pop(step).result()


def _describe_nonfinite(feed: Feed, step: int, batch: Batch) -> str:
    """Describes the first number of each array that is not finite, in the batch of a run whose batch never grows."""
    index = step if feed.skipped is None else feed.skipped.batch_index(step)
    descriptions = []
    for name, value in batch.items():
        try:
            BatchSpec().check({name: np.asarray(value)}, partial(_position, feed.source, feed.size, index), feed.rows)
        except CorruptBatch as error:
            descriptions.append(error.problems[0].got)
    return ", ".join(descriptions)


def _position(source: Any, size: int, index: int, row: int) -> str:
    where = getattr(source, "where", None)
    return where(index, size, row) if where else f"batch {index} of {source.fingerprint}"


def rows_here(layout: Layout, size: int) -> np.ndarray:
    """Returns the sorted indices of the rows of a global batch that this process's devices hold."""
    sharding = batch_sharding(layout, (size,))
    indices = sharding.addressable_devices_indices_map((size,)).values()
    ranges = {index[0].indices(size)[:2] for index in indices if index is not None}
    return np.concatenate([np.arange(begin, end) for begin, end in sorted(ranges)])


def interleave(draws: Sequence[Batch]) -> dict[str, Any]:
    """Interleaves draws into one batch: example i of every draw, then example i + 1 of every draw.

    On any mesh, a device's shard of the result consists of its shards of the draws. As microbatches take examples with
    a stride, each microbatch of the result is a microbatch of one draw.
    """
    if len(draws) == 1:
        return dict(draws[0])
    stacked = {name: np.stack([draw[name] for draw in draws], axis=1) for name in draws[0]}
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in stacked.items()}
