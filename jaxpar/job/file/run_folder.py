"""The folder of a run before it starts: its files, the job that was trained there, and the changes of that job.

is a file in the way?   do its checkpoints fit run.resume?   is it writable?   is the data the same?

    RUN/job.toml                         the job of the latest start
    RUN/job.0001.toml, job.0002.toml …   earlier jobs, oldest first

Layout, devices and memory savings may change at any time: the next loss is the same. A change that alters the next
loss, or trains on held-out examples, is refused unless `run.changed` names its key.
"""

import json
import os
import re
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from jaxpar.checkpoint import listing
from jaxpar.errors import JaxparError, Problem, file_errors, refuse, suggest
from jaxpar.exchange.base import Exchange
from jaxpar.files import write_text
from jaxpar.job.file.dump import dumps, toml_value
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job

# Reads the job of a run folder, naming the file in every error, and protects the user's own files there.

NAME = "job.toml"
JOB_RULE = "job.toml in the run folder is the job that the run was trained with"
LOST = {
    NAME: "what the job changes is not known",
    "run.json": "whether the data are those that it was trained on is not known",
}
UNREPORTED_SECTIONS = ("run.", "metrics.")
EXCHANGE = "parallel.exchange"  # another exchange has other keys: it counts as one change
# how the data is read changes nothing; the data itself is compared by its fingerprint
FREE = ("data.ahead", "data.images.threads", "data.path", "data.pattern", "data.sets", "data.source")
BINDING = ("data.", "model.", "optimizer.", EXCHANGE, "parallel.pipeline.weights", "sweep.",
           "train.adapters.", "train.dpo.", "train.freeze",
           "train.global_batch", "train.grow", "train.loss", "train.precision.compute", "train.seed")  # fmt: skip
SPLIT = ("data.held_out", "data.seq")  # keys that decide which examples are held out
MISSING = "not set"


def read_job(folder: Path, *, allow_import: bool = False) -> Job:
    """Returns the job that a run was trained with.

    Raises:
      JaxparError: If it cannot be read; every problem names the file, as the user also has a job of their own.
    """
    file = folder / NAME
    if not file.exists():
        raise refuse(f"{folder} holds no {NAME}", rule=JOB_RULE, fix="the folder of a run that jaxpar train began")
    fix = f"mv {file} {file}.damaged, if the job is the same"
    try:
        with file_errors(file, rule=JOB_RULE, fix=fix):
            return loads(file.read_text(encoding="utf-8"), allow_import=allow_import)
    except JaxparError as error:
        messages = [problem.got.removeprefix("job: ") for problem in error.problems]
        raise JaxparError(
            *(Problem(got if str(file) in got else f"{file} is damaged: {got}", JOB_RULE, fix) for got in messages)
        ) from error


def check_user_files(folder: Path) -> None:
    """Refuses a folder without a run whose job.toml or metrics.jsonl a run would replace.

    Raises:
      JaxparError: With every such file.
    """
    if (folder / "run.json").exists() or listing.steps(folder / "checkpoints"):
        return
    rule, fix = "a run writes job.toml and metrics.jsonl into a folder of its own", "run.dir = 'runs/mine'"
    problems = []
    for name in (NAME, "metrics.jsonl"):
        file = folder / name
        try:
            if file.exists() and not _is_resolved(file):
                problems.append(Problem(f"run.dir = {str(folder)!r}: {file} is not of a run", rule, fix))
        except (OSError, ValueError) as error:
            got = f"run.dir = {str(folder)!r}: {file}: {getattr(error, 'strerror', None) or 'is no text'}"
            raise refuse(got, rule=rule, fix=fix) from error
    if problems:
        raise JaxparError(*problems)


def lost_files(folder: Path) -> list[str]:
    """Reports each missing file of a resumed run, and the facts that are unknown without it."""
    return [f"{folder / name} is not there: {effect}" for name, effect in LOST.items() if not (folder / name).exists()]


def _is_resolved(file: Path) -> bool:
    """Whether a run that was killed at its start may have left this file: a resolved job, or metrics without rows."""
    text = file.read_text(encoding="utf-8")
    if file.name != NAME:
        return not text
    try:
        return dumps(loads(text)) == text
    except JaxparError:
        return False


FOLDERS = (
    "checkpoints", "data", "huggingface", "mlflow", "processes", "profile", "tensorboard", "trackio", "wandb",
)  # fmt: skip
FILES = (
    "job.toml", "run.json", "metrics.jsonl", "events.jsonl", "lock", "loggers.json", "output.log", "lineage.jsonl",
)  # fmt: skip
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
            fix="run.dir = a folder that you may write to, such as 'runs/mine'",
        ) from error


def check_same_data(folder: Path, fingerprint: str | None) -> dict[str, Any]:
    """Reads RUN/run.json of a resumed run, {} if it is missing; refuses data that differs from that of the run.

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
            rule="a run continues with the data that it began with",
            fix="another run.dir, or the data it began with",
        )
    return recorded


@dataclass(frozen=True)
class KeyChange:
    """A key of a job whose value has changed; both values as TOML writes them."""

    key: str
    old_value: str
    new_value: str

    def __str__(self) -> str:
        return f"{self.key} = {self.new_value}, it was {self.old_value}"

    @property
    def fix(self) -> str:
        """The fix that restores the old value."""
        return f"leave {self.key} out" if self.old_value == MISSING else f"{self.key} = {self.old_value}"


def compare_jobs(folder: Path, job: Job) -> list[KeyChange]:
    """Compares a job with the one that a run folder was trained with.

    Raises:
      JaxparError: If RUN/job.toml cannot be read.
    """
    if not (folder / NAME).exists():
        return []
    previous = read_job(folder)
    old, new = key_values(previous), key_values(job)
    result = [
        KeyChange(key, old.get(key, MISSING), new.get(key, MISSING))
        for key in new | old
        if not key.startswith(UNREPORTED_SECTIONS) and old.get(key, MISSING) != new.get(key, MISSING)
    ]
    if old[f"{EXCHANGE}.name"] == new[f"{EXCHANGE}.name"]:
        return result
    exchange_change = KeyChange(EXCHANGE, _settings(previous.parallel.exchange), _settings(job.parallel.exchange))
    return [exchange_change, *(change for change in result if not change.key.startswith(f"{EXCHANGE}."))]


def check_changes(differences: list[KeyChange], job: Job, at: int) -> None:
    """Refuses changes that alter the run's losses unless `run.changed` names them.

    Args:
      differences: The changes.
      job: The current job; its `run.changed` names the allowed keys.
      at: The step that the run continues from.

    Raises:
      JaxparError: With every changed key that is not named, and every name that is no key.
    """
    keys = key_values(job)
    problems = [
        Problem(f"run.changed = {name!r}", "run.changed names keys of the job", suggest(name, keys))
        for name in job.run.changed
        if name not in {*keys, *(change.key for change in differences)}
    ]
    binding = [change for change in differences if _binds(change, job, at)]
    words = toml_value([*job.run.changed, *(change.key for change in binding if change.key not in job.run.changed)])
    problems += [
        Problem(
            f"{change}, up to step {at}",
            "a resumed run holds out the same examples, so that none of them was trained on"
            if change.key in SPLIT
            else "a resumed run has the same losses as one that was never stopped",
            f"{change.fix}; or another run.dir; or, if it is meant: run.changed = {words}",
        )
        for change in binding
        if change.key not in job.run.changed
    ]
    if problems:
        raise JaxparError(*problems)


def save_job(folder: Path, job: Job) -> None:
    """Writes RUN/job.toml; a different earlier one is kept under a number."""
    file, text = folder / "job.toml", dumps(job)
    if file.exists():
        previous = file.read_text(encoding="utf-8", errors="replace")
        if previous == text:
            return
        ids = [int(match[1]) for path in folder.iterdir() if (match := re.fullmatch(r"job\.(\d{4,})\.toml", path.name))]
        write_text(folder / f"job.{max(ids, default=0) + 1:04d}.toml", previous)
    write_text(file, text)


def _binds(change: KeyChange, job: Job, at: int) -> bool:
    if change.key == "train.steps":  # an unfinished run would get other learning rates
        return job.optimizer.decay != "constant" and at < int(change.old_value)
    return change.key.startswith(BINDING) and change.key not in FREE


def _settings(exchange: Exchange) -> str:
    """Formats an exchange as an inline TOML table without its default values."""
    values = {item.name: getattr(exchange, item.name) for item in fields(exchange)}
    return toml_value(
        {f.name: values[f.name] for f in fields(exchange) if f.name == "name" or values[f.name] != f.default}
    )


def key_values(job: Any, prefix: str = "") -> dict[str, str]:
    """Flattens all tables of a job to dotted key → TOML value, e.g. `parallel.pipeline.schedule`."""
    table: Mapping[str, Any] = job if isinstance(job, dict) else {f.name: getattr(job, f.name) for f in fields(job)}
    result: dict[str, str] = {}
    for name, value in table.items():
        if is_dataclass(value) or (not prefix and isinstance(value, dict)):
            result |= key_values(value, f"{prefix}{name}.")
        elif prefix:
            result[prefix + name] = toml_value(value)
    return result
