"""Compares a job with the one its run was trained with and prints the changes.

    RUN/job.toml                         the job of the latest start
    RUN/job.0001.toml, job.0002.toml …   earlier jobs, oldest first

Layout, devices and memory savings may change at any time: the next loss is the same. A change that alters the next
loss, or trains on held-out examples, is refused unless `run.changed` names its key.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, Problem, suggest
from jaxpar.exchange.base import Exchange
from jaxpar.files import write_text
from jaxpar.job.file.dump import dumps, toml_value
from jaxpar.job.file.run_folder import NAME, job_of
from jaxpar.job.file.schema import Job

UNSAID = ("run.", "metrics.")
EXCHANGE = "parallel.exchange"  # another exchange has other keys: it counts as one change
# how the data is read changes nothing; the data itself is compared by its fingerprint
FREE = ("data.ahead", "data.images.threads", "data.path", "data.pattern", "data.sets", "data.source")
BINDING = ("data.", "model.", "optimizer.", EXCHANGE, "parallel.pipeline.weights", "sweep.",
           "train.adapters.", "train.dpo.", "train.freeze",
           "train.global_batch", "train.grow", "train.loss", "train.precision.compute", "train.seed")  # fmt: skip
SPLIT = ("data.held_out", "data.seq")  # keys that decide which examples are held out
MISSING = "not set"


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


def compare(folder: Path, job: Job) -> list[KeyChange]:
    """Compares a job with the one that a run folder was trained with.

    Raises:
      JaxparError: If RUN/job.toml cannot be read.
    """
    if not (folder / NAME).exists():
        return []
    previous = job_of(folder)
    old, new = key_values(previous), key_values(job)
    result = [
        KeyChange(key, old.get(key, MISSING), new.get(key, MISSING))
        for key in new | old
        if not key.startswith(UNSAID) and old.get(key, MISSING) != new.get(key, MISSING)
    ]
    if old[f"{EXCHANGE}.name"] == new[f"{EXCHANGE}.name"]:
        return result
    exchange_change = KeyChange(EXCHANGE, _settings(previous.parallel.exchange), _settings(job.parallel.exchange))
    return [exchange_change, *(change for change in result if not change.key.startswith(f"{EXCHANGE}."))]


def check(differences: list[KeyChange], job: Job, at: int) -> None:
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
