"""A job that is run: compiled once, and stepped from its newest state, whatever of it is measured."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax

from ...gpu.jobs.training import Built, Training


class Runs:
    """A step that is compiled once and run from its newest state.

    Attributes:
      built: The job on its device.
      batch: On the device.
      state: The newest.
      compiling: Seconds to the end of the first step.
      from_cache: Whether the program was one that an earlier process had compiled.
    """

    def __init__(self, job: Training, device: Any):
        self.built: Built = job.on([device])
        self.batch = self.built.step.put(job.batches())
        self.state = self.built.state()
        begin, before = time.perf_counter(), _kept()
        self.once()
        self.compiling, self.from_cache = time.perf_counter() - begin, before == _kept() > 0

    def once(self) -> None:
        """Makes one step, and waits for its end."""
        self.steps(1)

    def steps(self, count: int, batches: Callable[[], Any] | None = None) -> float:
        """Makes some steps, the host ahead of the device, and returns the seconds of one."""
        begin = time.perf_counter()
        for _ in range(count):
            self.state, metrics = self.built.step(self.state, batches() if batches else self.batch)
        jax.block_until_ready(metrics)
        return (time.perf_counter() - begin) / count


def _kept() -> int:
    """Returns how many programs are in the cache of compiled ones; 0 without one."""
    folder = jax.config.values["jax_compilation_cache_dir"]
    return len(list(Path(folder).glob("*"))) if folder and Path(folder).is_dir() else 0
