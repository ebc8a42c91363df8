"""The batches of a stretch of steps, read ahead by a thread where the job says so.

    thread    read 5 | read 6 | read 7 (slow) ........... | read 8
    devices   step 3 | step 4 | step 5 | step 6           | step 7       waits only if all that was read is used up

Which batch a step takes does not depend on when it is read, so a run with reading ahead is that without, bit for bit.
"""

import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from types import TracebackType
from typing import Any

import jax

from jaxpar.errors import JaxparError
from jaxpar.train.feed import Feed


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
        self._asked: dict[int, Future] = {}

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
            if each not in self._asked:
                self._asked[each] = self._pool.submit(self.feed.read, each)
        return self._asked.pop(step).result()
