"""Writes one checkpoint to the disk while training goes on.

    each process: its arrays/00003 in 000200.writing, hashed and on the disk
    the first: MANIFEST of what all wrote ─► fsync ─► renamed to 000200

A kill at any moment leaves either the whole checkpoint, or a folder with another name than `000200`.
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

from jaxpar.checkpoint import listing, manifest, paths, processes
from jaxpar.checkpoint.arrays import save
from jaxpar.checkpoint.arrays.blocks import Block, file_of
from jaxpar.files import sync

_BLOCKS = pydantic.TypeAdapter(dict[str, list[Block]])
_COUNT = itertools.count()  # of the checkpoints that this process has begun: the same on all


@dataclass(frozen=True, kw_only=True)
class Write:
    """A checkpoint that is being written.

    Attributes:
      step: Its step.
      bytes: Bytes of its arrays.
      done: Done once it is committed, or with the error that stopped it.
      worker: The thread that commits it.
    """

    step: int
    bytes: int
    done: Future
    worker: ThreadPoolExecutor


def begin(
    folder: Path, step: int, state: Any, scores: Mapping[str, float], replicas: manifest.SavedReplicas | None = None
) -> Write:
    """Starts writing a checkpoint; returns as soon as its arrays are copied."""
    listed = paths.described(state)
    final = folder.resolve() / listing.name_of(step)
    writing = final.with_name(final.name + listing.WRITING)
    worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    about = {"step": step, "written": time.time(), "scores": scores, "arrays": listed, "replicas": replicas}
    done = worker.submit(_finish, save.copied(paths.flat(state)), writing, final, next(_COUNT), about)
    return Write(step=step, bytes=sum(each.bytes for each in listed.values()), done=done, worker=worker)


def after(write: Write, act: Callable[[], None]) -> Write:
    """Returns the write, followed by an action once it is committed."""

    def _then() -> None:
        write.done.result()
        act()

    return dataclasses.replace(write, done=write.worker.submit(_then))


def _finish(parts: list[save.Copied], writing: Path, final: Path, number: int, about: dict[str, Any]) -> None:
    """Writes the blocks of this process; the first then lists those of all, and renames the folder."""
    process = jax.process_index()
    file = writing / file_of(process)

    def written() -> str:
        file.parent.mkdir(parents=True, exist_ok=True)
        return _BLOCKS.dump_json(save.write(file, process, parts)).decode()

    texts = processes.told_to_first(f"jaxpar/checkpoint/{number}", written)
    if processes.is_first():
        blocks: dict[str, list[Block]] = {}
        for text in texts:
            for path, mine in _BLOCKS.validate_json(text).items():
                blocks.setdefault(path, []).extend(mine)
        manifest.write(writing, blocks=blocks, **about)
        # last, and atomic: a folder with its final name is whole. The parent is synced too, as a rename is an entry in
        # it, which a power cut would lose
        writing.rename(final)
        sync(final.parent)


def remove(folder: Path, step: int) -> None:
    """Deletes the remains of a failed write."""
    for path in list(listing.left_over(folder)):
        if path.name.startswith(listing.name_of(step) + listing.WRITING):
            listing.delete(path)
