"""Checks of a run folder that need no compiled step; `train` enforces them and `jaxpar check` reports them earlier.

is a file in the way?   do its checkpoints fit run.resume?   is it writable?   is the data the same?
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import listing
from jaxpar.errors import file_errors, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import check_user_files

FOLDERS = ("checkpoints", "data", "tensorboard", "huggingface", "processes")
FILES = ("job.toml", "run.json", "metrics.jsonl", "events.jsonl", "lock", "output.log", "lineage.jsonl")
RULE, FIX = "each run has its own folder", "run.dir = 'runs/mine'"


def check_folder(job: Job, folder: Path) -> list[int]:
    """Returns the steps of the existing checkpoints, if `run.resume` allows to continue from them.

    Raises:
      JaxparError: If the path cannot be a run folder, or its checkpoints contradict `run.resume`.
    """
    subject = f"run.dir = {job.run.dir!r:.200}"
    try:
        files = [path for path in (folder, *folder.absolute().parents) if os.path.lexists(path) and not path.is_dir()]
        files += [path for name in FOLDERS if os.path.lexists(path := folder / name) and not path.is_dir()]
        kind = "a file" if files and files[0].exists() else "a link to nothing"
        occupied = [path for name in FILES if (path := folder / name).is_dir()]
        steps = listing.steps(folder / "checkpoints")
    except (OSError, ValueError) as error:
        raise refuse(f"{subject}: {getattr(error, 'strerror', None) or error}", rule=RULE, fix=FIX) from error
    if files:
        raise refuse(f"{subject}: {files[0]} is {kind}", rule=RULE, fix=FIX)
    if occupied:
        raise refuse(f"{subject}: {occupied[0]} is a folder", rule=f"a run writes the file {occupied[0].name}", fix=FIX)
    if not steps:
        check_user_files(folder)
    if job.run.resume == "must" and not steps:
        raise refuse(
            f"run.resume = 'must', {folder} has no checkpoint",
            rule="run.resume = 'must' needs a checkpoint in the run folder",
            fix="run.resume = 'auto'",
        )
    if job.run.resume == "never" and steps:
        raise refuse(
            f"run.resume = 'never', {folder} has checkpoints up to step {steps[-1]}",
            rule="run.resume = 'never' needs a run folder without checkpoints",
            fix="another run.dir, or run.resume = 'auto'",
        )
    return steps


def check_writable(folder: Path) -> None:
    """Checks that a run folder is writable by writing temporary files there.

    Missing folders are made below a temporary name, so that a concurrent run does not see them appear and vanish.

    Raises:
      JaxparError: If it is not writable.
    """
    try:
        path = folder.absolute()
        parent = next(directory for directory in (path, *path.parents) if directory.is_dir())
        subfolders = [directory for name in FOLDERS if (directory := folder / name).is_dir()]
        for directory in (parent, *subfolders):
            with tempfile.TemporaryDirectory(dir=directory, prefix=".jaxpar-check-") as probe:
                (nested := Path(probe, *path.relative_to(parent).parts)).mkdir(parents=True, exist_ok=True)
                (nested / "job.toml").write_text("")
    except (OSError, ValueError) as error:
        raise refuse(
            f"run.dir = {str(folder)!r:.200} cannot be written: {getattr(error, 'strerror', None) or error}",
            rule=RULE,
            fix="run.dir = a folder that is yours, such as 'runs/mine'",
        ) from error


def check_same_data(folder: Path, fingerprint: str | None) -> dict[str, Any]:
    """Returns the RUN/run.json of a resumed run, {} if it is missing; refuses other data than it was trained on.

    Args:
      folder: The run folder.
      fingerprint: The fingerprint of the job's data; None skips the comparison.

    Raises:
      JaxparError: If run.json cannot be read, or the run began with other data.
    """
    file = folder / "run.json"
    if not file.exists():
        return {}
    with file_errors(
        file, rule="run.json records the data that the run was trained on", fix=f"rm {file}, if the data is the same"
    ):
        recorded = json.loads(file.read_text())
        fingerprint_then = recorded["data"]
    if fingerprint is not None and fingerprint_then != fingerprint:
        raise refuse(
            f"{folder} was trained on data {fingerprint_then}, the job's data is {fingerprint}",
            rule="a run goes on with the data it began with",
            fix="another run.dir, or the data it began with",
        )
    return recorded
