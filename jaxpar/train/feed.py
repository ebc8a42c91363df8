"""Batches on their way to the step: past those that the run skips, checked, each process its own rows.

    step ─► draws ─► batch of the source ─► numbers that can be ─► rows that are held here ─► arrays over all processes
                       ▲                          │ corrupt, and the job skips such ones
                       └──────── the next ◄───────┘

Which batch a step takes is a pure function of the step and of RUN/skipped_batches.json, so that a run resumes anywhere.
Batches are read while steps are computed, and what a step waited for its batch is measured:

    data.ahead = 0   the batch of a step is read while devices compute the step before
    data.ahead = 4   thread    read 5 | read 6 | read 7 (slow) ........... | read 8
                     devices   step 3 | step 4 | step 5 | step 6           | step 7 waits only if all read is used

When a batch is read does not change which it is, so a run that reads ahead is one that does not, bit for bit.
"""

import threading
import time
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
from jaxpar.optim.growth import Growth
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.specs import batch_sharding
from jaxpar.train.faults import Faults
from jaxpar.train.incomplete_batches import Incomplete
from jaxpar.train.skipped_batches import SkippedBatches


class Feed:
    """The batches of a run as its step wants them.

    Args:
      source: Where batches come from.
      layout: Where they go.
      size: Examples per global batch; of the first phase, if it grows.
      growth: How it grows.
      good: What a good batch is; None looks at none.
      skipped: The batches that the run skips; None where it can skip none.
      faults: What is done about a corrupt batch.
      say: Where it is told that a batch was passed over.
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
        self.rows: Rows = rows_here(layout, size) if jax.process_count() > 1 else None
        self._one = threading.Lock()  # batches may be read ahead by a thread, and no source need know of two
        self._evaluation_feeds: dict[str, Feed] = {}
        self._bad_out: list[int] = []  # held-out batches that are corrupt, in their order
        self.incomplete = Incomplete()

    def evaluation_feed(self, name: str, held: EvaluationSet) -> "Feed":
        """Returns the feed of an evaluation set, which goes to the same layout in batches of the same size."""
        if name not in self._evaluation_feeds:
            made = self._evaluation_feeds[name] = copy(self)
            made.source, made._bad_out, made.incomplete = held, [], Incomplete(name)
        return self._evaluation_feeds[name]

    def batch(self, step: int) -> Mapping[str, Any]:
        """Returns the training batch of a step: in one process as it is, in several on the devices.

        Raises:
          JaxparError: If it is corrupt, and the job does not skip such ones; or too many are, one after the other.
        """
        return self.placed(self.read(step))

    def evaluation(self, index: int) -> list[WeightedBatch]:
        """Returns the index-th held-out examples that are not corrupt, with their weights; none after the last.

        Raises:
          JaxparError: If one is, and the job does not skip such ones.
        """
        return [replace(each, batch=self.placed(each.batch)) for each in self.read_evaluation(index)]

    def read(self, step: int) -> Batch:
        """Returns the rows that this process holds of the training batch of a step, on the host."""
        with self._one:
            return merged([self._draw(draw, step) for draw in self.growth.draws(step)])

    def _draw(self, draw: int, step: int) -> Batch:
        """Returns the rows that this process holds of a draw, one of those that a step takes."""
        passed: list[CorruptBatch] = []
        while True:
            index = draw if self.skipped is None else self.skipped.batch_of(draw)
            try:
                batch = self.source.batch(index, self.size, *self._wanted_rows)
                return self._select_rows(self._checked(batch, partial(self._where, index)))
            except CorruptBatch as error:
                skipped = self._pass(f"the batch of step {step + 1}", error, passed)
                skipped.pass_over(draw, error.problems[0].got)

    def read_evaluation(self, index: int) -> list[WeightedBatch]:
        """Returns the rows that this process holds of the index-th held-out examples, on the host."""
        with self._one:
            return self._read_evaluation(index)

    def rearranged(self, index: int, rows: np.ndarray) -> Mapping[str, Any]:
        """Returns rows of the index-th held-out batch, which may be filled up, as a batch of so many: see `placed`.

        Args:
          index: Of the batch.
          rows: Those of all processes, in order; one may come several times.
        """
        if self.rows is None:
            return select_rows(self.read_evaluation(index)[0].batch, rows)
        part, here = copy(self), rows_here(self.layout, len(rows))
        part.rows = rows[here]
        batch = part.read_evaluation(index)[0].batch
        part.rows, part.size = here, len(rows)
        return part.placed(batch)

    def _read_evaluation(self, index: int) -> list[WeightedBatch]:
        passed: list[CorruptBatch] = []
        while True:
            at = index
            for bad in self._bad_out:
                at += bad <= at
            try:
                batches = (
                    self.source.evaluation(at, self.size, *self._wanted_rows) or []
                )  # users write None, too, for none
                for each in batches:
                    self._checked(each.batch, lambda _, at=at: f"held-out batch {at}")
                return [replace(each, batch=self._select_rows(each.batch)) for each in batches]
            except CorruptBatch as error:
                self._pass("a held-out batch", error, passed)
                self._bad_out = sorted([*self._bad_out, at])

    @property
    def _skips(self) -> bool:
        return self.skipped is not None and self.faults.on_bad_batch == "skip"

    @property
    def _wanted(self) -> Rows:
        """The rows that are read: where corrupt batches are skipped all of them, for all processes must skip alike."""
        return None if self._skips else self.rows

    @property
    def _wanted_rows(self) -> tuple[Rows, ...]:
        """The same as an argument where they are not all: a source of one process need not know of rows."""
        return () if self._wanted is None else (self._wanted,)

    def _select_rows(self, batch: Batch) -> Batch:
        return select_rows(batch, self.rows) if self._skips else batch

    def _checked(self, batch: Batch, lies: Callable[[int], str]) -> Batch:
        return batch if self.good is None else self.good.check(batch, lies, self._wanted)

    def _where(self, index: int, row: int) -> str:
        """Returns in words where a row of a training batch lies."""
        where = getattr(self.source, "where", None)
        return where(index, self.size, row) if where else f"batch {index} of {self.source.fingerprint}"

    def _pass(self, what: str, error: CorruptBatch, passed: list[CorruptBatch]) -> SkippedBatches:
        """Says that a batch is passed over; raises if the job stops there, or too many were."""
        problem = error.problems[0]
        got = f"{what} is corrupt: {problem.got}"
        if self.skipped is None or not self._skips:
            skip = "" if self.skipped is None else "; or faults.on_bad_batch = 'skip'"
            raise refuse(got, rule=problem.rule, fix=problem.fix + skip) from error
        passed.append(error)
        if len(passed) > self.faults.skips:
            raise refuse(
                f"{len(passed)} corrupt batches one after the other, the last: {problem.got}",
                rule=f"faults.skips = {self.faults.skips} may be skipped in a row",
                fix=problem.fix,
            ) from error
        self.say(f"{got}; passed over")
        return self.skipped

    def placed(self, batch: Batch) -> dict[str, Any]:
        """Returns the rows of all processes as one array each; of one process what it has, which the step places."""
        return batch if self.rows is None else {name: self._global(value) for name, value in batch.items()}

    def _global(self, value: np.ndarray) -> jax.Array:
        """Returns the global array [size, ...] of which this process has some rows: of so many draws, as merged."""
        held: Any = self.rows
        times = len(value) // len(held)
        rows, size = (held[:, None] * times + np.arange(times)).ravel(), self.size * times
        shape = (size, *value.shape[1:])

        def shard(index):
            begin, end, _ = index[0].indices(size)
            at = np.searchsorted(rows, begin)
            return value[(slice(at, at + end - begin), *index[1:])]

        value = value.astype(jax.dtypes.canonicalize_dtype(value.dtype))
        return jax.make_array_from_callback(shape, batch_sharding(self.layout, shape), shard)


class Reader:
    """Reads the batches of steps, in their order.

    Args:
      feed: Reads and places them.
      ahead: Batches that are read before they are wanted; with 0 there is no thread.
      last: Steps of the run: no batch is read beyond.
    """

    def __init__(self, feed: Feed, *, ahead: int, last: int):
        self.feed, self.ahead, self.last = feed, ahead, last
        self._pool = ThreadPoolExecutor(1, "batches") if ahead else None
        self._wanted_rows: dict[int, Future] = {}

    def __enter__(self) -> "Reader":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._pool is not None:  # who goes back to a checkpoint reads again, and not beside what is still read
            self._pool.shutdown(wait=kind is not None and issubclass(kind, JaxparError), cancel_futures=True)

    def batch(self, step: int, before: Mapping[str, Any] | None) -> tuple[Mapping[str, Any], float]:
        """Returns the batch of a step on its way to the devices, and the seconds that the step waited for it.

        These are the seconds that the host waited, if the step before is done by then; else 0. So they are an upper
        bound: the step before may have been done in their midst.

        Args:
          step: From 0, one more at each call.
          before: The metrics of the step before, if that is still in flight.

        Raises:
          JaxparError: What reading it raised.
        """
        began = time.perf_counter()
        batch = self.feed.placed(self._read(step))
        waited = time.perf_counter() - began
        arrays = [value for value in (before or {}).values() if isinstance(value, jax.Array)]
        done = all(array.is_ready() for array in arrays)  # pyright: ignore[reportAttributeAccessIssue]
        return batch, waited if done else 0.0

    def _read(self, step: int) -> Any:
        if self._pool is None:
            return self.feed.read(step)
        for each in range(step, min(step + 1 + self.ahead, self.last)):
            if each not in self._wanted_rows:
                self._wanted_rows[each] = self._pool.submit(self.feed.read, each)
        return self._wanted_rows.pop(step).result()


def rows_here(layout: Layout, size: int) -> np.ndarray:
    """Returns the rows of a global batch that this process's devices hold, in order."""
    sharding = batch_sharding(layout, (size,))
    indices = sharding.addressable_devices_indices_map((size,)).values()
    held = {index[0].indices(size)[:2] for index in indices if index is not None}
    return np.concatenate([np.arange(begin, end) for begin, end in sorted(held)])


def merged(draws: Sequence[Batch]) -> dict[str, Any]:
    """Returns draws as one batch: examples i of all draws one after the other, then examples i + 1.

    So a device's share of the whole is its share of each draw, on any mesh; and each microbatch of the whole, which
    takes every so many-th example, is one of a draw.
    """
    if len(draws) == 1:
        return dict(draws[0])
    each = {name: np.stack([draw[name] for draw in draws], axis=1) for name in draws[0]}
    return {name: value.reshape(-1, *value.shape[2:]) for name, value in each.items()}
