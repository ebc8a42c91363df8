"""Compares a job with the one its run was trained with: changes are printed, and must be named if they change a loss.

    RUN/job.toml                         the job as it was started last
    RUN/job.0001.toml, job.0002.toml …   those before it, oldest first

Where a model is trained (layout, devices, how memory is saved) may change at any time: the next loss is the same. What
changes the next loss, or trains on examples that were held out, is done only if `run.changed` names it.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, nearest
from jaxpar.exchange.base import Exchange
from jaxpar.files import write_text
from jaxpar.job.file.dump import dumps, shown
from jaxpar.job.file.schema import Job
from jaxpar.job.file.trained_job import NAME, job_of

UNSAID = ("run.", "metrics.")
EXCHANGE = "parallel.exchange"  # another one has other keys, and is one change
# how it is read changes nothing, and the data itself is compared by its fingerprint
FREE = ("data.ahead", "data.path", "data.pattern", "data.sets", "data.source")
BINDING = ("data.", "model.", "optimizer.", EXCHANGE, "parallel.pipeline.weights", "sweep.",
           "train.adapters.", "train.freeze",
           "train.global_batch", "train.grow", "train.loss", "train.precision.compute", "train.seed")  # fmt: skip
SPLIT = ("data.held_out", "data.seq")  # where held-out examples begin
MISSING = "not set"


@dataclass(frozen=True)
class Change:
    """A key of a job that has another value than before, both as TOML writes them."""

    key: str
    was: str
    now: str

    def __str__(self) -> str:
        return f"{self.key} = {self.now}, it was {self.was}"

    @property
    def way_back(self) -> str:
        """What to write for the value that it had."""
        return f"leave {self.key} out" if self.was == MISSING else f"{self.key} = {self.was}"


def changes(folder: Path, job: Job) -> list[Change]:
    """Returns the keys in which a job differs from the one that a run folder was trained with.

    Raises:
      JaxparError: If RUN/job.toml cannot be read.
    """
    if not (folder / NAME).exists():
        return []
    before = job_of(folder)
    was, now = _keys(before), _keys(job)
    found = [
        Change(key, was.get(key, MISSING), now.get(key, MISSING))
        for key in now | was
        if not key.startswith(UNSAID) and was.get(key, MISSING) != now.get(key, MISSING)
    ]
    if was[f"{EXCHANGE}.name"] == now[f"{EXCHANGE}.name"]:
        return found
    whole = Change(EXCHANGE, _settings(before.parallel.exchange), _settings(job.parallel.exchange))
    return [whole, *(each for each in found if not each.key.startswith(f"{EXCHANGE}."))]


def check(found: list[Change], job: Job, at: int) -> None:
    """Refuses changes that make another run of it and are not asked for.

    Args:
      found: The changes.
      job: The job as it is now; `run.changed` names what may.
      at: The step that the run goes on from.

    Raises:
      JaxparError: With every key that is not named, and every name that is no key.
    """
    keys = _keys(job)
    problems = [
        Problem(f"run.changed = {name!r}", "run.changed names keys of the job", nearest(name, keys))
        for name in job.run.changed
        if name not in {*keys, *(change.key for change in found)}
    ]
    bound = [change for change in found if _binds(change, job, at)]
    words = shown([*job.run.changed, *(change.key for change in bound if change.key not in job.run.changed)])
    problems += [
        Problem(
            f"{change}, up to step {at}",
            "examples that were held out are not trained on, nor the other way round"
            if change.key in SPLIT
            else "a run that goes on has the losses of one that was never stopped",
            f"{change.way_back}; or another run.dir; or, if it is meant: run.changed = {words}",
        )
        for change in bound
        if change.key not in job.run.changed
    ]
    if problems:
        raise JaxparError(*problems)


def keep(folder: Path, job: Job) -> None:
    """Writes RUN/job.toml; the one before it gets a number, if it is another."""
    file, text = folder / "job.toml", dumps(job)
    if file.exists():
        before = file.read_text(encoding="utf-8", errors="replace")
        if before == text:
            return
        taken = [int(made[1]) for path in folder.iterdir() if (made := re.fullmatch(r"job\.(\d{4,})\.toml", path.name))]
        write_text(folder / f"job.{max(taken, default=0) + 1:04d}.toml", before)
    write_text(file, text)


def _binds(change: Change, job: Job, at: int) -> bool:
    if change.key == "train.steps":  # the rates of a run that is not at its end would be others
        return job.optimizer.decay != "constant" and at < int(change.was)
    return change.key.startswith(BINDING) and change.key not in FREE


def _settings(exchange: Exchange) -> str:
    """Returns an exchange as a table on one line, without what is its default."""
    given = {each.name: getattr(exchange, each.name) for each in fields(exchange)}
    return shown({f.name: given[f.name] for f in fields(exchange) if f.name == "name" or given[f.name] != f.default})


def _keys(job: Any, prefix: str = "") -> dict[str, str]:
    """Returns key to value of all tables, such as `parallel.pipeline.schedule`, as TOML writes it."""
    own: Mapping[str, Any] = job if isinstance(job, dict) else {f.name: getattr(job, f.name) for f in fields(job)}
    found: dict[str, str] = {}
    for name, value in own.items():
        if is_dataclass(value) or (not prefix and isinstance(value, dict)):
            found |= _keys(value, f"{prefix}{name}.")
        elif prefix:
            found[prefix + name] = shown(value)
    return found
