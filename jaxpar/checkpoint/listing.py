"""Lists, finds and deletes the checkpoints of a folder; retained are the latest, and the best by a score.

Names and MANIFESTs are read, no arrays. Imports no jax.
"""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path

from jaxpar.checkpoint import manifest
from jaxpar.checkpoint.spec import Checkpoints
from jaxpar.errors import JaxparError, refuse

WRITING, DAMAGED, DELETED, LEFT = ".writing", ".damaged", ".deleted", ".left"


def folder_name(step: int) -> str:
    """Name of the folder of a checkpoint.

    >>> folder_name(200)
    '000200'
    """
    return f"{step:06d}"


def steps(folder: Path) -> list[int]:
    """Steps of the committed checkpoints, oldest first; their content is not checked."""
    if not folder.is_dir():
        return []
    paths = (path for path in folder.iterdir() if re.fullmatch("[0-9]{6,}", path.name) and path.is_dir())
    return sorted(int(path.name) for path in paths if path.name == folder_name(int(path.name)))


def newest(folder: Path) -> int | None:
    """Newest step with a valid MANIFEST of that step; its arrays are not checked."""
    for step in reversed(steps(folder)):
        try:
            return manifest.read(folder / folder_name(step)).step
        except JaxparError:  # `Store.restore` reports what is wrong
            continue
    return None


def remains(folder: Path) -> Iterator[Path]:
    """Yields the remains of a killed run: half-written checkpoints, and half-deleted ones."""
    if folder.is_dir():
        pattern = rf"[0-9]{{6,}}({WRITING}|{DELETED})(\..*)?"
        yield from (path for path in folder.iterdir() if re.fullmatch(pattern, path.name))


def delete(path: Path) -> None:
    """Deletes the remains of a write, folder or file; files still being written are deleted before the next write."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def set_aside(path: Path, suffix: str = DAMAGED) -> Path:
    """Renames a checkpoint that is damaged, or later than the step that training went back to; returns the new path."""
    target = path.with_name(path.name + suffix)
    if target.exists():
        shutil.rmtree(target)
    return path.rename(target)


def find(where: Path, step: int | None = None) -> Path:
    """Finds a checkpoint by a run folder, a folder of checkpoints or its own path.

    Args:
      where: The folder.
      step: The step of the checkpoint; default: the latest.

    Raises:
      JaxparError: If there is none.
    """
    try:
        is_run = (where / "checkpoints").is_dir()
        is_checkpoint = not is_run and (where / manifest.NAME).exists()
        folder = checkpoint_folder(where)
        available = steps(folder)
    except (OSError, ValueError) as error:  # a path that is too long, has a null byte, or belongs to another user
        raise refuse(
            f"{str(where)!r:.200}: {getattr(error, 'strerror', None) or error}",
            rule="a checkpoint lies in a folder that can be read",
            fix="the path of a run folder, such as runs/mine",
        ) from error
    if is_checkpoint:
        if step is not None and where.name != folder_name(step):
            raise refuse(
                f"{where} and step {step}",
                rule="the path of a checkpoint and --step name the same step",
                fix="leave the step out",
            )
        return where
    if not available or (step is not None and step not in available):
        step_list = ", ".join(map(str, available[-8:]))
        raise refuse(
            f"no checkpoint {'' if step is None else f'of step {step} '}in {folder}",
            rule="a run folder holds checkpoints/000200 and the like",
            fix=f"--step {available[-1]}; there are {step_list}"
            if available
            else f"the path of a run folder or a checkpoint that is there; or train it first: jaxpar train JOB "
            f"run.dir={where}",
        )
    return folder / folder_name(available[-1] if step is None else step)


def checkpoint_folder(where: Path) -> Path:
    """Folder of checkpoints in a run folder, or else the folder itself."""
    return where / "checkpoints" if (where / "checkpoints").is_dir() else where


def read_scores(folder: Path, step: int) -> dict[str, float]:
    """Scores of a checkpoint; empty if its MANIFEST is lost."""
    try:
        return manifest.read(folder / folder_name(step)).scores
    except JaxparError:
        return {}


def rank(folder: Path, steps: Sequence[int], spec: Checkpoints) -> list[tuple[float, int]]:
    """Returns (key, step) of the checkpoints that have the score `spec.best`; the best has the lowest key."""
    sign = 1 if spec.best_is == "lowest" else -1
    scores = [(read_scores(folder, step).get(spec.best), step) for step in steps]
    return [(sign * score, step) for score, step in scores if score is not None]


def delete_old(folder: Path, spec: Checkpoints) -> None:
    """Deletes the checkpoints that are not retained."""
    available = steps(folder)
    retained = set(available[-spec.keep_last :])
    if spec.keep_best:
        retained |= {step for _, step in sorted(rank(folder, available, spec))[: spec.keep_best]}
    for step in available:
        if step not in retained:
            path = folder / folder_name(step)
            # renamed first: deleting takes time, and a kill in the middle of it must not leave half a checkpoint
            shutil.rmtree(path.rename(path.with_name(path.name + DELETED)))
