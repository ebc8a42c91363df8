"""Reads a run folder for its report. Needs no jax."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxpar import files
from jaxpar.checkpoint import checkpoint_tables as checkpoints
from jaxpar.errors import JaxparError, file_errors, refuse
from jaxpar.html.charts import Card
from jaxpar.job.report import kernel_times
from jaxpar.job.report.kernel_times import StepProfile

# Type checks of the files of a run: an altered file is refused by name before a page is rendered from it.

NUMBERS = ("tokens", "seconds", "tokens_per_second", "input_wait_seconds")  # optional numbers of a row
LARGEST = 1e18  # largest number on a page
LATEST = 1e11  # seconds since 1970, in the year 5138
TABLES = ("mesh", "versions", "layout", "peak")  # optional tables of run.json


def check_metrics(path: Path, rows: Iterable[Mapping[str, object]]) -> None:
    """Checks that steps and summed metrics are numbers, and that every integer is in the drawable range.

    Raises:
      JaxparError: With the first bad row.
    """
    for row in rows:
        errors = [name for name in ("step", *NUMBERS) if row.get(name) is not None and not _is_number(row[name])]
        errors += [name for name, value in row.items() if isinstance(value, int) and not _is_number(value, flags=True)]
        if not _is_number(row.get("step"), whole=True):
            errors = ["step", *errors]
        if errors:
            raise _altered_error(
                path, f"step {row.get('step')!r:.40} has {errors[0]} = {_format_value(row.get(errors[0]))}"
            )


def check_events(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Checks that steps and times of events are numbers.

    Raises:
      JaxparError: With the first bad event.
    """
    for event in events:
        step, time = event.get("step"), event.get("time")
        if step is not None and not _is_number(step, whole=True):
            raise _altered_error(path, f"step = {_format_value(step)}")
        if time is not None and not (_is_number(time) and 0 <= time < LATEST):
            raise _altered_error(path, f"time = {_format_value(time)}")


def check_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Checks the tables and numbers of run.json that a page reads.

    Raises:
      JaxparError: With the first bad value.
    """
    for name in TABLES:
        if facts.get(name) is not None and not isinstance(facts[name], dict):
            raise _altered_error(path, f"{name} = {_format_value(facts[name])}, and no table")
    numbers = {name: facts.get(name) for name in ("parameters",)}
    for table in ("mesh", "peak"):
        numbers |= {f"{table}.{name}": value for name, value in (facts.get(table) or {}).items()}
    for name, value in numbers.items():
        if value is not None and not _is_number(value, whole=name.startswith("mesh.")):
            raise _altered_error(path, f"{name} = {_format_value(value)}, and no number")


def _is_number(value: object, *, whole: bool = False, flags: bool = False) -> bool:
    if isinstance(value, bool):
        return flags
    if not isinstance(value, int if whole else (int, float)):
        return False
    return value != value or abs(value) <= LARGEST or value in (float("inf"), float("-inf"))


def _format_value(value: object) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.40}"


def _altered_error(path: Path, got: str) -> JaxparError:
    return refuse(
        f"{path}: {got}",
        rule="a report reads the files that a run has written",
        fix=f"mv {path} {path}.damaged, or without that line",
    )


RECORD_RULE = "run.json is what a run says of its machine and layout"


@dataclass(frozen=True)
class RunEvent:
    """An event of a run.

    Attributes:
      step: The last step before the event.
      when: Seconds since 1970; None if not recorded.
      kind: start, fault, checkpoint, changed, or said (any other message).
      what: The message.
    """

    step: int
    when: float | None
    kind: str
    what: str


@dataclass(frozen=True, kw_only=True)
class RunContents:
    """The contents of a run folder.

    Attributes:
      folder: The run folder.
      rows: A dict of metrics per step.
      facts: The contents of run.json: devices, versions, mesh, layout.
      jobs: The keys and values of each job that the run was started with, oldest first.
      checkpoints: The checkpoints as `jaxpar checkpoint ls` lists them.
      messages: The messages of events.jsonl, with step and time.
      profiles: The profiles of `train.profile`.
    """

    folder: Path
    rows: list[dict[str, Any]]
    facts: Mapping[str, Any]
    jobs: list[dict[str, str]]
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    messages: list[dict[str, Any]] = field(default_factory=list)
    profiles: list[StepProfile] = field(default_factory=list)

    @property
    def is_timed(self) -> bool:
        """Whether timings are meaningful: False on CPUs, where devices are simulated."""
        return "cpu" not in str(self.facts.get("devices", "cpu")).lower()

    @cached_property
    def cards(self) -> list[Card]:
        """Cards that show the sharding of parameters; [] for an older run that did not record it."""
        with file_errors(
            self.folder / "run.json",
            rule=RECORD_RULE,
            fix="jaxpar train JOB, which goes on with the run and writes it anew",
        ):
            return [Card.from_record(card) for card in self._layout.get("cards", ())]

    @property
    def axes(self) -> list[list[str]]:
        """A row for each axis of the mesh: see `axes_table`."""
        return [[str(cell) for cell in row] for row in self._layout.get("axes", ()) if len(row) == 5]

    @property
    def _layout(self) -> dict[str, Any]:
        layout = self.facts.get("layout")
        return layout if isinstance(layout, dict) else {}

    @property
    def changed(self) -> list[tuple[str, str, str]]:
        """(key, was, now) of each key that differs between a job and the one after it."""
        changes = []
        for old, new in zip(self.jobs, self.jobs[1:], strict=False):
            keys = dict.fromkeys([*old, *new])
            changes += [(k, old.get(k, "-"), new.get(k, "-")) for k in keys if old.get(k) != new.get(k)]
        return changes

    @cached_property
    def events(self) -> list[RunEvent]:
        """Starts, faults, changes and messages about checkpoints, in the order in which they happened."""
        result = [
            RunEvent(int(event.get("step") or 0), event.get("time"), classify_event(event["said"]), event["said"])
            for event in self.messages
        ]
        skip_steps = {int(number) for event in result for number in re.findall(r"^step (\d+) skipped", event.what)}
        for row in self.rows:  # have no time: each comes after the last message of an earlier step
            if row.get("skipped") and row["step"] not in skip_steps:
                place = max((number for number, event in enumerate(result, 1) if event.step < row["step"]), default=0)
                text = f"step {row['step']} skipped: its update was not taken"
                result.insert(place, RunEvent(row["step"], None, "fault", text))
        return result


def read(folder: Path) -> RunContents:
    """Reads a run folder.

    Raises:
      JaxparError: If it is no run folder, or one of its files cannot be read.
    """
    metrics = folder / "metrics.jsonl"
    if not metrics.is_file():
        raise refuse(
            f"{folder} has no metrics.jsonl",
            rule="RUN is the folder of a run that made a step",
            fix="jaxpar report runs/quickstart, say: run.dir of the job",
        )
    rows = [row for row in _lines(metrics) if isinstance(row.get("step"), int)]
    check_metrics(metrics, rows)
    if not rows:
        raise refuse(
            f"{metrics} is empty", rule="a report is of at least one step", fix="train it first: jaxpar train JOB"
        )
    facts = _json(folder / "run.json") if (folder / "run.json").exists() else {}
    check_facts(folder / "run.json", facts)
    earlier = sorted(path for path in folder.iterdir() if re.fullmatch(r"job\.\d{4,}\.toml", path.name))
    jobs = [_keys(_toml(path)) for path in (*earlier, folder / "job.toml") if path.exists()]
    checkpoint_rows = checkpoints.ls(folder) if (folder / "checkpoints").is_dir() else []
    events = folder / "events.jsonl"
    messages = [line for line in _lines(events) if isinstance(line.get("said"), str)] if events.exists() else []
    check_events(events, messages)
    return RunContents(
        folder=folder, rows=rows, facts=facts, jobs=jobs, checkpoints=checkpoint_rows, messages=messages,
        profiles=kernel_times.read(folder),
    )  # fmt: skip


def classify_event(message: str) -> str:
    """Classifies an event by its message."""
    kinds = (
        ("fault", r"skipped|rolled? ?back|roll back|damaged|nan\b|spike|stopped|killed|lock is broken"),
        ("changed", r"^changed since|it was "),
        ("start", r", on from step|^on from step| on .*devices|parameters, "),
        ("checkpoint", r"checkpoint|saved|restored"),
    )
    return next((kind for kind, words in kinds if re.search(words, message)), "said")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Reads a file of JSON lines; a truncated last line, left by a kill, is skipped."""
    result: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")  # a text may contain U+2028
    for number, line in enumerate(lines, 1):
        try:
            result.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if line.strip() and number < len(lines):
                raise _unreadable_error(path, f"line {number} is no JSON", f"mv {path} {path}.damaged") from error
    return [row for row in result if isinstance(row, dict)]


def _json(path: Path) -> dict[str, Any]:
    with file_errors(path, rule="run.json is what a run says of its machine", fix=f"mv {path} {path}.damaged"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return files.parse_toml(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _unreadable_error(path, f"it is no TOML: {error}", f"mv {path} {path}.damaged") from error


def _unreadable_error(path: Path, got: str, fix: str) -> JaxparError:
    return refuse(f"{path}: {got}", rule="a report reads the files that a run has written", fix=fix)


def _keys(table: Mapping[str, object], prefix: str = "") -> dict[str, str]:
    """Flattens all tables to dotted key → JSON value, e.g. `train.steps`."""
    result: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value:
            result |= _keys(value, f"{prefix}{name}.")
        else:
            result[prefix + name] = json.dumps(value, default=str)
    return result
