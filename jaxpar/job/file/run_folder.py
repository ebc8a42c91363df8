"""Checks of a run folder that need no step: `train` refuses by them, and `jaxpar check` says so before.

is a file in the way?   do its checkpoints fit run.resume?   can it be written?   are the data the same?
"""

import json
import os
import tempfile
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import listing
from jaxpar.errors import reading, refuse
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import check_foreign

FOLDERS = ("checkpoints", "data", "tensorboard", "huggingface", "processes")
FILES = ("job.toml", "run.json", "metrics.jsonl", "events.jsonl", "lock", "output.log", "lineage.jsonl")
RULE, FIX = "each run has its own folder", "run.dir = 'runs/mine'"


def check_folder(job: Job, folder: Path) -> list[int]:
    """Returns the steps of the checkpoints to go on from, by the job's wish.

    Raises:
      JaxparError: If the path cannot be a run folder, or its checkpoints are not as `run.resume` asks.
    """
    where = f"run.dir = {job.run.dir!r:.200}"
    try:
        wrong = [path for path in (folder, *folder.absolute().parents) if os.path.lexists(path) and not path.is_dir()]
        wrong += [path for name in FOLDERS if os.path.lexists(path := folder / name) and not path.is_dir()]
        kind = "a file" if wrong and wrong[0].exists() else "a link to nothing"
        occupied = [path for name in FILES if (path := folder / name).is_dir()]
        steps = listing.steps(folder / "checkpoints")
    except (OSError, ValueError) as error:
        raise refuse(f"{where}: {getattr(error, 'strerror', None) or error}", rule=RULE, fix=FIX) from error
    if wrong:
        raise refuse(f"{where}: {wrong[0]} is {kind}", rule=RULE, fix=FIX)
    if occupied:
        raise refuse(f"{where}: {occupied[0]} is a folder", rule=f"a run writes the file {occupied[0].name}", fix=FIX)
    if not steps:
        check_foreign(folder)
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
    """Checks that a run could write its folder, by writing a file there; what is made is deleted.

    The missing folders are made under another name, so that no run beside this check sees them come and go.

    Raises:
      JaxparError: If it could not.
    """
    try:
        path = folder.absolute()
        above = next(each for each in (path, *path.parents) if each.is_dir())
        inner = [each for name in FOLDERS if (each := folder / name).is_dir()]
        for each in (above, *inner):
            with tempfile.TemporaryDirectory(dir=each, prefix=".jaxpar-check-") as probe:
                (deep := Path(probe, *path.relative_to(above).parts)).mkdir(parents=True, exist_ok=True)
                (deep / "job.toml").write_text("")
    except (OSError, ValueError) as error:
        raise refuse(
            f"run.dir = {str(folder)!r:.200} cannot be written: {getattr(error, 'strerror', None) or error}",
            rule=RULE,
            fix="run.dir = a folder that is yours, such as 'runs/mine'",
        ) from error


def check_same_data(folder: Path, fingerprint: str | None) -> dict[str, Any]:
    """Returns RUN/run.json of a run that goes on; nothing where it is missing.

    Args:
      folder: The run folder.
      fingerprint: Of the job's data; None is not compared.

    Raises:
      JaxparError: If it cannot be read, or the run began with other data.
    """
    file = folder / "run.json"
    if not file.exists():
        return {}
    with reading(
        file, rule="run.json records the data that the run was trained on", fix=f"rm {file}, if the data is the same"
    ):
        recorded = json.loads(file.read_text())
        before = recorded["data"]
    if fingerprint is not None and before != fingerprint:
        raise refuse(
            f"{folder} was trained on data {before}, the job's data is {fingerprint}",
            rule="a run goes on with the data it began with",
            fix="another run.dir, or the data it began with",
        )
    return recorded
