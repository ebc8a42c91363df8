"""Reads the job of a run folder, naming the file in every error, and protects the user's own files there.

RUN/job.toml    written by `jaxpar.job.file.changes`; before a run has begun in the folder, it is the user's file
"""

from pathlib import Path

from jaxpar.checkpoint import listing
from jaxpar.errors import JaxparError, Problem, file_errors, refuse
from jaxpar.job.file.dump import dumps
from jaxpar.job.file.parse import loads
from jaxpar.job.file.schema import Job

NAME = "job.toml"
RULE = "job.toml in the run folder is the job that the run was trained with"
LOST = {
    NAME: "what the job changes is not known",
    "run.json": "whether the data are those that it was trained on is not known",
}


def job_of(folder: Path, *, allow_import: bool = False) -> Job:
    """Returns the job that a run was trained with.

    Raises:
      JaxparError: If it cannot be read; every problem names the file, as the user also has a job of their own.
    """
    file = folder / NAME
    if not file.exists():
        raise refuse(f"{folder} holds no {NAME}", rule=RULE, fix="the folder of a run that jaxpar train began")
    fix = f"mv {file} {file}.damaged, if the job is the same"
    try:
        with file_errors(file, rule=RULE, fix=fix):
            return loads(file.read_text(encoding="utf-8"), allow_import=allow_import)
    except JaxparError as error:
        messages = [problem.got.removeprefix("job: ") for problem in error.problems]
        raise JaxparError(
            *(Problem(got if str(file) in got else f"{file} is damaged: {got}", RULE, fix) for got in messages)
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
    """Reports each missing file of a resumed run, and what is unknown without it."""
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
