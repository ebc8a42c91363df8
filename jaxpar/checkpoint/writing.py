"""Writes one checkpoint to the disk while training goes on.

    Orbax ─► 000200.writing ─► MANIFEST in it ─► fsync of all files ─► renamed to 000200

A kill at any moment leaves either the whole checkpoint, or a folder with another name than `000200`.
"""

import dataclasses
import time
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import listing, manifest, orbax, processes
from jaxpar.files import sync


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


def begin(folder: Path, step: int, state: Any, scores: Mapping[str, float]) -> Write:
    """Starts writing a checkpoint; returns as soon as its arrays are copied."""
    listed = orbax.described(state)
    final = folder.resolve() / listing.name_of(step)
    writing = final.with_name(final.name + listing.WRITING)
    worker = ThreadPoolExecutor(1, thread_name_prefix="checkpoint")
    done: Future = Future()
    try:
        response = orbax.save(writing, state, step)
        about = {"step": step, "written": time.time(), "scores": scores, "arrays": listed}
        done = worker.submit(_finish, response, writing, final, about)
    except orbax.UNREADABLE as error:  # raised by `Store.wait`, as errors of the thread are
        done.set_exception(error)
    return Write(step=step, bytes=sum(each.bytes for each in listed.values()), done=done, worker=worker)


def after(write: Write, act: Callable[[], None]) -> Write:
    """Returns the write, followed by an action once it is committed."""

    def _then() -> None:
        write.done.result()
        act()

    return dataclasses.replace(write, done=write.worker.submit(_then))


def _finish(response: Any, writing: Path, final: Path, about: dict[str, Any]) -> None:
    """Waits for the arrays of all processes; the first one then hashes and renames the folder."""
    response.result()
    if processes.is_first():
        manifest.write(writing, **about)
        # last, and atomic: a folder with its final name is whole. The parent is synced too, as a rename is an entry in
        # it, which a power cut would lose
        writing.rename(final)
        sync(final.parent)


def remove(folder: Path, step: int) -> None:
    """Deletes the remains of a failed write."""
    for path in list(listing.left_over(folder)):
        if path.name.startswith(listing.name_of(step) + listing.WRITING):
            listing.delete(path)
