"""The checkpoints of one run: saves them asynchronously, verifies them on loading, and finds the newest good one.

    save ──► arrays copied to the host ──► training goes on
                       └─► thread: hashed and written to a temporary folder, MANIFEST, rename: committed

A checkpoint exists once its folder has its final name; so a kill at any moment leaves either a complete checkpoint or a
folder that the next save deletes. An error of loading says what is wrong with each damaged one.
"""

import errno
import shutil
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Literal

from jaxpar.checkpoint import array_files, listing, manifest, processes, reading, saved_replicas, writing
from jaxpar.checkpoint.spec import Checkpoints
from jaxpar.errors import LOST, JaxparError, Problem, refuse
from jaxpar.files import FULL, make_folder
from jaxpar.units import show_bytes

NONE = -1  # broadcast in place of a step by processes whose value is ignored
LIST_BYTES = 4096  # bytes on disk per array for the list of its blocks and the file system's rounding


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=4)


class PartialWrite(JaxparError):
    """Raised if this process cannot write its part while others wait: the run must restart from the last checkpoint."""

    status = LOST


@dataclass
class Store:
    """The checkpoints of one run.

    With several processes, each has a store of the same folder, and all call the same methods at the same point (except
    `close`). Each process writes and reads its part of the arrays; the first also lists, renames and deletes.

    Attributes:
      folder: The folder of the checkpoints.
      spec: The `[checkpoint]` table: how many and which are retained.
      say: Takes a line for the user: a damaged checkpoint, a full disk. A warning by default.
      is_owner: Whether a run writes to the folder; only then are damaged checkpoints renamed.
      on_commit: Called on the writing thread after each checkpoint, or None.
      replicas: The replicas whose arrays [replica, ...] a state has; None if no array has a dim of replicas.
    """

    folder: Path
    spec: Checkpoints
    say: Callable[[str], None] = _warn
    is_owner: bool = True
    on_commit: Callable[[], None] | None = None
    replicas: manifest.SavedReplicas | None = None
    _pending: writing.PendingWrite | None = field(default=None, init=False)
    _disk_error: JaxparError | None = field(default=None, init=False)

    def steps(self) -> list[int]:
        """Steps of the committed checkpoints, oldest first; `restore` verifies their content."""
        return listing.steps(self.folder)

    def save(self, step: int, state: object, scores: dict[str, float]) -> None:
        """Starts writing the state; waits for the previous write, and returns when the arrays are copied.

        If the first of several processes finds too little free space, no process writes, because for a replicated state
        only the first would fail. If the disk becomes full during the write, the run ends: see `wait`.

        Raises:
          JaxparError: If the previous write failed, except for a full disk, which is only reported.
        """
        self.wait()
        if processes.is_first():
            make_folder(self.folder)
            for path in list(listing.remains(self.folder)):  # of a killed run or a failed write
                listing.delete(path)
        needed = sum(
            array.bytes + LIST_BYTES for array in array_files.describe(state).values()
        )  # of all processes together
        # the first process decides for all: on a shared file system the others may still see an older folder, and if
        # they decided differently some would wait for the others for ever
        if processes.broadcast(step in self.steps()):
            return
        lacks_space = (
            processes.is_multiprocess() and processes.is_first() and shutil.disk_usage(self.folder).free < needed
        )
        if processes.broadcast(lacks_space):
            self._note_full_disk(step, needed)
        else:
            self._pending = writing.begin(self.folder, step, state, scores, self.replicas)
            if self.on_commit:
                self._pending = writing.run_after_commit(self._pending, self.on_commit)

    def score(self, step: int, scores: dict[str, float]) -> None:
        """Adds scores to the MANIFEST of a checkpoint that is saved already, or is still being written.

        Raises:
          JaxparError: If the MANIFEST cannot be read or written.
        """
        if not processes.is_first():
            return
        save_scores = partial(_save_scores, self.folder, step, scores, self.say)
        if self._pending is not None and self._pending.step == step:
            self._pending = writing.run_after_commit(self._pending, save_scores)
        elif self.path(step).is_dir():
            save_scores()
            listing.delete_old(self.folder, self.spec)

    def wait(self) -> None:
        """Waits until the last write is committed, then deletes checkpoints that are not retained.

        Raises:
          JaxparError: If it failed, except for a full disk. With several processes, if it failed for any reason, on the
            process that failed; the others wait for it in a barrier, until the watchdog ends them.
        """
        if self._pending is None:
            return
        write, self._pending = self._pending, None
        error = write.future.exception()
        write.worker.shutdown()
        if error is None:
            processes.broadcast(0)  # a barrier: the first has renamed it, so that all list the same steps from here on
            self._disk_error = None
            if processes.is_first():
                listing.delete_old(self.folder, self.spec)
        elif processes.is_multiprocess():
            raise PartialWrite(*_write_error(self.folder, write, error).problems) from error
        else:
            # one process can go on without this checkpoint: what it wrote is deleted, which frees the disk again
            writing.remove(self.folder, write.step)
            if _errno(error) not in FULL:
                raise _write_error(self.folder, write, error) from error
            self._note_full_disk(write.step, write.bytes)

    def finish(self) -> None:
        """Waits for the last write of a run.

        Raises:
          JaxparError: If it failed for any reason, since the last steps are then not saved.
        """
        self.wait()
        if self._disk_error is not None:
            raise self._disk_error

    def close(self) -> None:
        """Waits for a current write, only on this process, so that a run that fails still has the checkpoint.

        It raises no error, because it is called while another error is handled, which it must not hide.
        """
        if self._pending is not None:
            write, self._pending = self._pending, None
            error = write.future.exception()
            write.worker.shutdown()
            if error is not None:
                self.say(str(_write_error(self.folder, write, error)))

    def restore(self, like: object, step: int | None = None) -> tuple[Any, int]:
        """Loads the state of a checkpoint with the shardings of `like`; returns it and its step.

        Args:
          like: The state as `jax.ShapeDtypeStruct`s with shardings; the layout may differ from that of the save, and
            the number of replicas too, if the spec allows it.
          step: The step to load; default: the newest good one. Newer ones that are damaged are reported and set aside.

        Raises:
          JaxparError: If there is no good checkpoint, or it does not fit; the message has the damage of each
            checkpoint, or every difference by path.
        """
        damaged = {}
        for candidate in _candidates(self.folder, step):
            try:
                arrays, note = _load(self.folder, candidate, like, replicas=self.spec.replicas)
            except reading.DamagedCheckpoint as found:
                damaged[candidate] = found.faults
                continue
            # damaged checkpoints are renamed only now: if none is good, all keep their names for the user to inspect
            if processes.is_first():
                for damaged_step, problem in zip(damaged, _damage_problems(self.folder, damaged), strict=True):
                    _set_aside(self, problem, damaged_step, candidate)
            if note and processes.is_first():
                self.say(f"step {candidate}: {note}")
            return array_files.unflatten(like, arrays), candidate
        if damaged:
            raise JaxparError(*_damage_problems(self.folder, damaged))
        raise _no_checkpoint_error(self.folder, step)

    def set_aside_after(self, step: int) -> list[str]:
        """Sets aside the checkpoints after the step from which training goes on; returns their new names.

        Only the first process renames; the others compute the same list of steps.
        """
        return [listing.set_aside(self.path(later), listing.LEFT).name for later in self.steps() if later > step]

    def path(self, step: int) -> Path:
        """Folder of a checkpoint."""
        return self.folder / listing.folder_name(step)

    def _note_full_disk(self, step: int, needed: int) -> None:
        free = shutil.disk_usage(self.folder).free
        last_steps, is_new = self.steps()[-1:], self._disk_error is None
        self._disk_error = refuse(
            f"step {step} is not saved: the disk of {self.folder} is full ({show_bytes(needed)} needed, "
            f"{show_bytes(free)} free)",
            rule="the disk has free space for one checkpoint more than are kept",
            fix=f"free disk space, or a smaller checkpoint.keep_last ({self.spec.keep_last}); "
            + (f"the same command goes on from step {last_steps[0]}" if last_steps else "nothing is saved yet"),
        )
        if is_new and processes.is_first():
            self.say(
                f"{self._disk_error.problems[0].got}; training goes on, "
                + (f"step {last_steps[0]} stays the last that is saved, " if last_steps else "nothing is saved yet, ")
                + "and the next checkpoint is tried"
            )


def _set_aside(store: Store, problem: Problem, step: int, used: int) -> None:
    renamed_note = f"; it is called {listing.set_aside(store.path(step)).name} now" if store.is_owner else ""
    store.say(f"{problem.got}; step {used} is used instead{renamed_note}")


def _save_scores(folder: Path, step: int, scores: Mapping[str, float], say: Callable[[str], None]) -> None:
    try:
        manifest.score(folder / listing.folder_name(step), scores)
    except OSError as error:  # without scores a checkpoint is still good: only keep_best cannot choose it
        if error.errno not in FULL:
            raise
        say(f"the scores of step {step} are not saved: the disk of {folder} is full")


def _write_error(folder: Path, write: writing.PendingWrite, error: BaseException) -> JaxparError:
    code = _errno(error)
    cause = errno.errorcode.get(code, str(code)) if code else (str(error) or type(error).__name__).splitlines()[0]
    return refuse(
        f"step {write.step} is not saved in {folder}: {cause:.160}",
        rule="checkpoints can be written in the folder of the run",
        fix=f"a folder {folder} that can be written, or another run.dir; "
        "the same command goes on from the last checkpoint",
    )


def _errno(error: BaseException) -> int | None:
    return error.errno if isinstance(error, OSError) else None


def _candidates(folder: Path, step: int | None) -> Iterator[int]:
    """Yields the steps to try, newest first, from the first process, whose view of the folder is up to date."""
    available = listing.steps(folder)
    steps = available[::-1] if step is None else [step] if step in available else []
    for index in range(processes.broadcast(len(steps))):
        yield processes.broadcast(steps[index] if processes.is_first() else NONE)


def _load(
    folder: Path, step: int, like: object, *, replicas: Literal["same", "mean", "broadcast"]
) -> tuple[dict[str, Any], str]:
    """Loads the arrays of a checkpoint by path; returns them and a note for the user.

    Args:
      folder: The folder of the checkpoints.
      step: Its step.
      like: As for `Store.restore`.
      replicas: How replicas resume under another number of them: see `Checkpoints`.

    Raises:
      DamagedCheckpoint: If it is damaged.
      JaxparError: If it does not fit.
    """
    path = folder / listing.folder_name(step)
    run = path.parent.parent if path.parent.name == "checkpoints" else path
    contents = reading.read_manifest(path)
    arrays, note = saved_replicas.read(path, contents, like, how=replicas, run=str(run))
    saved = arrays.get("step")
    if saved is not None and not saved.shape and int(saved) != step:
        raise reading.DamagedCheckpoint(path, [f"its state is of step {int(saved)}"])
    return arrays, note


def _damage_problems(folder: Path, damaged: Mapping[int, list[str]]) -> list[Problem]:
    """Returns the problem of each damaged step, given its faults."""
    available, result = listing.steps(folder), []
    for step, faults in damaged.items():
        others = ", ".join(str(number) for number in [other for other in available if other != step][-4:])
        listed = "; ".join(faults[:3]) + (f"; and {len(faults) - 3} more" if faults[3:] else "")
        result.append(
            Problem(
                f"checkpoint {folder / listing.folder_name(step)} is damaged: {listed}",
                "every byte has the hash that the MANIFEST lists, and the folder the name of its step",
                f"another step ({others})" if others else "train anew, in another run.dir",
            )
        )
    return result


def _no_checkpoint_error(folder: Path, step: int | None) -> JaxparError:
    """Returns the error that a folder has no checkpoint, or none of a step."""
    return refuse(
        f"no {'good ' * (not step)}checkpoint {'' if step is None else f'of step {step} '}in {folder}",
        rule="a run is resumed from a checkpoint",
        fix="train it first: jaxpar train JOB",
    )
