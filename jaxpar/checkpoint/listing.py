"""The checkpoints of a folder, as they lie there: which are whole, which is the newest good one. Takes no jax."""

import json
import re
import shutil
from collections.abc import Iterator
from pathlib import Path

from jaxpar.checkpoint import manifest
from jaxpar.errors import JaxparError, refuse

WRITING, DAMAGED, DELETED, LEFT = ".writing", ".damaged", ".deleted", ".left"


def name_of(step: int) -> str:
    """Returns the name of a checkpoint's folder.

    >>> name_of(200)
    '000200'
    """
    return f"{step:06d}"


def steps(folder: Path) -> list[int]:
    """Returns the steps of the checkpoints that were committed, oldest first; whether they are good is not asked."""
    if not folder.is_dir():
        return []
    named = (path for path in folder.iterdir() if re.fullmatch("[0-9]{6,}", path.name) and path.is_dir())
    return sorted(int(path.name) for path in named if path.name == name_of(int(path.name)))


def newest(folder: Path) -> int | None:
    """Returns the newest step whose MANIFEST is whole and of that step; its arrays are not looked at."""
    for step in reversed(steps(folder)):
        try:
            return manifest.read(folder / name_of(step)).step
        except JaxparError:  # what is wrong is said by whoever restores
            continue
    return None


def left_over(folder: Path) -> Iterator[Path]:
    """Yields the remains of a killed run: half-written checkpoints, and half-deleted ones."""
    if folder.is_dir():
        pattern = rf"[0-9]{{6,}}({WRITING}|{DELETED})(\..*)?"
        yield from (path for path in folder.iterdir() if re.fullmatch(pattern, path.name))


def delete(path: Path) -> None:
    """Deletes the remains of a write, folder or file; files that are still being written go with the next write."""
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)


def is_older(path: Path) -> bool:
    """Returns whether a checkpoint was written by a jaxpar that made no MANIFEST; of later ones it is damaged."""
    if (path / manifest.NAME).exists():
        return False
    try:
        custom = json.loads((path / "_CHECKPOINT_METADATA").read_text())["custom_metadata"]
        return isinstance(custom, dict) and "step" in custom and "jaxpar" not in custom
    except (OSError, ValueError, TypeError, KeyError):
        return False


def refuse_older(path: Path) -> JaxparError:
    """Returns the error for a checkpoint without a MANIFEST, whose bytes cannot be checked."""
    return refuse(
        f"checkpoint {path} has no MANIFEST: an older jaxpar wrote it",
        rule="a checkpoint is loaded only if its MANIFEST lists the hash of every file",
        fix=f"jaxpar checkpoint verify {path} --adopt, which makes the list of what is there now",
    )


def set_aside(path: Path, mark: str = DAMAGED) -> Path:
    """Renames a checkpoint that is damaged, or that training went back behind; returns its new path."""
    aside = path.with_name(path.name + mark)
    if aside.exists():
        shutil.rmtree(aside)
    return path.rename(aside)


def find(where: Path, step: int | None = None) -> Path:
    """Returns the checkpoint that a user means by a run folder, a folder of checkpoints or one checkpoint.

    Args:
      where: The folder.
      step: Which one of a run; the latest by default.

    Raises:
      JaxparError: If there is none.
    """
    try:
        is_run = (where / "checkpoints").is_dir()
        is_one = not is_run and ((where / manifest.NAME).exists() or is_older(where))
        folder = shelf_of(where)
        there = steps(folder)
    except (OSError, ValueError) as error:  # too long, with a null byte, of another's
        raise refuse(
            f"{str(where)!r:.200}: {getattr(error, 'strerror', None) or error}",
            rule="a checkpoint lies in a folder that can be read",
            fix="the path of a run folder, such as runs/mine",
        ) from error
    if is_one:
        if step is not None and where.name != name_of(step):
            raise refuse(
                f"{where} and step {step}",
                rule="the path of a checkpoint and --step name the same step",
                fix="leave the step out",
            )
        return where
    if not there or (step is not None and step not in there):
        shown = ", ".join(map(str, there[-8:]))
        raise refuse(
            f"no checkpoint {'' if step is None else f'of step {step} '}in {folder}",
            rule="a run folder holds checkpoints/000200 and the like",
            fix=f"--step {there[-1]}; there are {shown}"
            if there
            else f"the path of a run folder or a checkpoint that is there; or train it first: jaxpar train JOB "
            f"run.dir={where}",
        )
    return folder / name_of(there[-1] if step is None else step)


def shelf_of(where: Path) -> Path:
    """Returns the folder of checkpoints of a run folder, or the folder itself."""
    return where / "checkpoints" if (where / "checkpoints").is_dir() else where
