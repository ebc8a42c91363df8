"""The job of a run in its folder: read with its name in every error, and no file of the user's replaced.

RUN/job.toml    written by `jaxpar.job.file.changes`; of a folder in which no run has begun it is the user's
"""

from pathlib import Path

from jaxpar.checkpoint import listing
from jaxpar.errors import JaxparError, Problem, reading, refuse
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
      JaxparError: If it cannot be read; every problem names the file, as the user has a job of his own.
    """
    file = folder / NAME
    if not file.exists():
        raise refuse(f"{folder} holds no {NAME}", rule=RULE, fix="the folder of a run that jaxpar train began")
    fix = f"mv {file} {file}.damaged, if the job is the same"
    try:
        with reading(file, rule=RULE, fix=fix):
            return loads(file.read_text(encoding="utf-8"), allow_import=allow_import)
    except JaxparError as error:
        found = [each.got.removeprefix("job: ") for each in error.problems]
        raise JaxparError(
            *(Problem(got if str(file) in got else f"{file} is damaged: {got}", RULE, fix) for got in found)
        ) from error


def check_foreign(folder: Path) -> None:
    """Refuses a folder without a run whose job.toml or metrics.jsonl a run would replace.

    Raises:
      JaxparError: With each file.
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
    """Returns a line for each file that a run which goes on has lost, and what is not known without it."""
    return [f"{folder / name} is not there: {why}" for name, why in LOST.items() if not (folder / name).exists()]


def _is_resolved(file: Path) -> bool:
    """Returns whether a file is as a run that was killed at its start leaves it: a resolved job, or no rows yet."""
    text = file.read_text(encoding="utf-8")
    if file.name != NAME:
        return not text
    try:
        return dumps(loads(text)) == text
    except JaxparError:
        return False
