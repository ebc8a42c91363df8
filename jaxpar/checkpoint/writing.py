"""Writes one checkpoint to disk while the training continues.

    each process: its arrays/00003 in 000200.writing, hashed and synced
    the first: MANIFEST of all blocks ─► fsync ─► renamed to 000200

A kill at any moment leaves either the complete checkpoint, or a folder with another name than `000200`.
"""

import dataclasses
import itertools
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import pydantic

from jaxpar.checkpoint import array_files, listing, manifest, processes
from jaxpar.checkpoint.blocks import SavedBlock, process_file
from jaxpar.checkpoint.spec import Checkpoints
from jaxpar.files import sync

_BLOCKS = pydantic.TypeAdapter(dict[str, list[SavedBlock]])
_COUNT = itertools.count()  # checkpoints that this process has begun: the same number on all processes


@dataclass(frozen=True, kw_only=True)
class PendingWrite:
    """A checkpoint that is being written.

    Attributes:
      step: Its step.
      bytes: Bytes of its arrays.
      future: Completes when the checkpoint is committed, or with the error that stopped it.
      worker: The thread that writes the checkpoint and commits it.
    """

    step: int
    bytes: int
    future: Future
    worker: ThreadPoolExecutor


def begin(
    folder: Path, step: int, state: object, scores: Mapping[str, float], replicas: manifest.SavedReplicas | None = None
) -> PendingWrite:
    """Starts writing a checkpoint; returns when its arrays are copied to the host."""
    arrays = array_files.describe(state)
    final = folder.resolve() / listing.folder_name(step)
    writing = final.with_name(final.name + listing.WRITING)
    worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    contents = {"step": step, "written": time.time(), "scores": scores, "arrays": arrays, "replicas": replicas}
    future = worker.submit(
        _finish, array_files.copy_to_host(array_files.flatten(state)), writing, final, next(_COUNT), contents
    )
    return PendingWrite(step=step, bytes=sum(array.bytes for array in arrays.values()), future=future, worker=worker)


def run_after_commit(write: PendingWrite, act: Callable[[], None]) -> PendingWrite:
    """Adds an action that runs on the write's thread once the checkpoint is committed."""

    def wait_and_run() -> None:
        write.future.result()
        act()

    return dataclasses.replace(write, future=write.worker.submit(wait_and_run))


def _finish(parts: list[array_files.HostBlock], writing: Path, final: Path, number: int, about: dict[str, Any]) -> None:
    """Writes the blocks of this process; the first process then writes the MANIFEST and renames the folder."""
    process = jax.process_index()
    file = writing / process_file(process)

    def write_blocks() -> str:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _BLOCKS.dump_json(array_files.write(file, process, parts)).decode()

    texts = processes.gather_to_first(f"jaxpar/checkpoint/{number}", write_blocks)
    if processes.is_first():
        blocks: dict[str, list[SavedBlock]] = {}
        for text in texts:
            for path, new_blocks in _BLOCKS.validate_json(text).items():
                blocks.setdefault(path, []).extend(new_blocks)
        manifest.write(writing, blocks=blocks, **about)
        # last, and atomic: a folder with its final name is complete. The parent is synced too, as a rename is an entry
        # in it, which a power cut would lose
        writing.rename(final)
        sync(final.parent)


def remove(folder: Path, step: int) -> None:
    """Deletes the remains of a failed write."""
    for path in list(listing.remains(folder)):
        if path.name.startswith(listing.folder_name(step) + listing.WRITING):
            listing.delete(path)


# Decides after which steps a checkpoint is written: every `every` steps, and when the last is `minutes` old.
#
# Processes have different clocks, but must save after the same step. So process 0 alone reads its clock, and broadcasts
# after how many steps it reads it again: half of the remaining time at the pace so far. That is about ten messages
# between two checkpoints, and none in the other steps.

FARTHEST = 2**30  # maximum steps to the next reading of the clock, which is broadcast as an int32


def seconds() -> float:
    """Seconds of this process's monotonic clock."""
    return time.monotonic()


class SaveSchedule:
    """Decides after each step whether a checkpoint is due; all processes must ask after the same steps.

    Args:
      spec: The `[checkpoint]` table.
      start: The step whose state is saved already.
    """

    def __init__(self, spec: Checkpoints, *, start: int):
        self.spec = spec
        self.mark_saved(start)

    def mark_saved(self, step: int) -> None:
        """Restarts the interval: the state of this step is saved."""
        self._since, self._step, self._look = seconds(), step, step + 1

    def may_save(self, step: int) -> bool:
        """Whether `is_due` may save or broadcast after this step; then no later step may be in flight."""
        return self._is_every(step) or (self.spec.minutes > 0 and step >= self._look)

    def is_due(self, step: int) -> bool:
        """Whether to save the state after this step; if so, the interval restarts."""
        if not self._is_every(step):
            if not self.may_save(step):
                return False
            if wait := processes.broadcast(self._steps_left(step)):
                self._look = step + wait
                return False
        self.mark_saved(step)
        return True

    def _is_every(self, step: int) -> bool:
        return self.spec.every > 0 and step % self.spec.every == 0

    def _steps_left(self, step: int) -> int:
        """Number of steps until the clock is read again; 0 if the last checkpoint is too old."""
        elapsed = seconds() - self._since
        remaining = self.spec.minutes * 60 - elapsed
        if remaining <= 0:
            return 0
        pace = elapsed / (step - self._step)
        return max(1, int(min(remaining / 2 / pace, FARTHEST))) if pace > 0 else 1
