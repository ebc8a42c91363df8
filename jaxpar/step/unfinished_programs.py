"""Programs that were sent to the devices and may not have ended."""

from collections import deque

import jax


class UnfinishedPrograms:
    """Bounds the number of unfinished programs; None for no bound.

    Simulated devices share a thread pool, which some dozens of unfinished steps fill and deadlock.
    """

    def __init__(self, limit: int | None):
        self.limit, self._results = limit, deque()

    def add(self, result: object) -> None:
        """Adds the result of a program; waits for the oldest if there are more than the limit."""
        if self.limit is not None:
            self._results.append(result)
            if len(self._results) > self.limit:
                jax.block_until_ready(self._results.popleft())

    def wait(self) -> None:
        """Waits for all programs; drops those that failed, whose error is known."""
        while self._results:
            try:
                jax.block_until_ready(self._results.popleft())
            except jax.errors.JaxRuntimeError:
                continue
