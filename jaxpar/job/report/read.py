"""Reads what a run folder says of its run. Takes no jax."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from jaxpar import toml
from jaxpar.checkpoint import report as checkpoints
from jaxpar.errors import JaxparError, reading, refuse
from jaxpar.html.pieces import Card
from jaxpar.job.report.records import check_events, check_facts, check_metrics

RECORDED = "run.json is what a run says of its machine and layout"


@dataclass(frozen=True)
class Event:
    """Something that happened in a run, beside its steps.

    Attributes:
      step: The last step before it.
      when: Seconds since 1970; None where that is not recorded.
      kind: start, fault, checkpoint, changed, or said.
      what: In words.
    """

    step: int
    when: float | None
    kind: str
    what: str


@dataclass(frozen=True, kw_only=True)
class Told:
    """A run, as its folder tells it.

    Attributes:
      folder: The folder.
      rows: A dict of metrics per step.
      facts: Of run.json: devices, versions, mesh, layout.
      jobs: Key to value of each job that it was started with, oldest first; the last is the newest.
      checkpoints: As `jaxpar checkpoint ls` lists them.
      said: What the run said and when, of events.jsonl.
    """

    folder: Path
    rows: list[dict[str, Any]]
    facts: Mapping[str, Any]
    jobs: list[dict[str, str]]
    checkpoints: list[dict[str, Any]] = field(default_factory=list)
    said: list[dict[str, Any]] = field(default_factory=list)

    @property
    def is_timed(self) -> bool:
        """Whether seconds mean something: not on processors, where devices are simulated."""
        return "cpu" not in str(self.facts.get("devices", "cpu")).lower()

    @cached_property
    def cards(self) -> list[Card]:
        """How parameters are cut into pieces, and who holds them; none where an older run did not record that."""
        with reading(
            self.folder / "run.json",
            rule=RECORDED,
            fix="jaxpar train JOB, which goes on with the run and writes it anew",
        ):
            return [Card.of(each) for each in self._layout.get("cards", ())]

    @property
    def axes(self) -> list[list[str]]:
        """A row for each axis of the mesh: see `axes_table`."""
        return [[str(cell) for cell in row] for row in self._layout.get("axes", ()) if len(row) == 5]

    @property
    def _layout(self) -> dict[str, Any]:
        found = self.facts.get("layout")
        return found if isinstance(found, dict) else {}

    @property
    def changed(self) -> list[tuple[str, str, str]]:
        """(key, was, now) of each key that differs between a job and the one after it."""
        found = []
        for was, now in zip(self.jobs, self.jobs[1:], strict=False):
            keys = dict.fromkeys([*was, *now])
            found += [(k, was.get(k, "-"), now.get(k, "-")) for k in keys if was.get(k) != now.get(k)]
        return found

    @cached_property
    def events(self) -> list[Event]:
        """Starts, faults, changes and what was said of checkpoints, in the order of steps."""
        found = [
            Event(int(each.get("step") or 0), each.get("time"), kind_of(each["said"]), each["said"])
            for each in self.said
        ]
        heard = {int(number) for each in found for number in re.findall(r"^step (\d+) skipped", each.what)}
        found += [
            Event(row["step"], None, "fault", f"step {row['step']} skipped: its update was not taken")
            for row in self.rows
            if row.get("skipped") and row["step"] not in heard
        ]
        return sorted(found, key=lambda each: (each.step, each.when or 0.0))


def read(folder: Path) -> Told:
    """Returns what a run folder tells.

    Raises:
      JaxparError: If it is no run folder, or a file in it cannot be read.
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
    there = checkpoints.ls(folder) if (folder / "checkpoints").is_dir() else []
    events = folder / "events.jsonl"
    said = [each for each in _lines(events) if isinstance(each.get("said"), str)] if events.exists() else []
    check_events(events, said)
    return Told(folder=folder, rows=rows, facts=facts, jobs=jobs, checkpoints=there, said=said)


def kind_of(said: str) -> str:
    """Returns the kind of an event by what was said of it."""
    kinds = (
        ("fault", r"skipped|rolled? ?back|roll back|damaged|nan\b|spike|stopped|killed"),
        ("changed", r"^changed since|it was "),
        ("start", r", on from step|^on from step| on .*devices|parameters, "),
        ("checkpoint", r"checkpoint|saved|restored"),
    )
    return next((kind for kind, words in kinds if re.search(words, said)), "said")


def _lines(path: Path) -> list[dict[str, Any]]:
    """Returns the objects of a file of JSON lines; a last line that a kill cut off is left out."""
    found: list[dict[str, Any]] = []
    lines = path.read_text(encoding="utf-8", errors="replace").rstrip("\n").split("\n")  # U+2028 may stand in a text
    for number, line in enumerate(lines, 1):
        try:
            found.append(json.loads(line))
        except (ValueError, RecursionError) as error:
            if line.strip() and number < len(lines):
                raise _broken(path, f"line {number} is no JSON", f"mv {path} {path}.damaged") from error
    return [row for row in found if isinstance(row, dict)]


def _json(path: Path) -> dict[str, Any]:
    with reading(path, rule="run.json is what a run says of its machine", fix=f"mv {path} {path}.damaged"):
        return dict(json.loads(path.read_text(encoding="utf-8")))


def _toml(path: Path) -> dict[str, Any]:
    try:
        return toml.loads(path.read_text(encoding="utf-8"))
    except (ValueError, RecursionError) as error:
        raise _broken(path, f"it is no TOML: {error}", f"mv {path} {path}.damaged") from error


def _broken(path: Path, got: str, fix: str) -> JaxparError:
    return refuse(f"{path}: {got}", rule="a report reads the files that a run has written", fix=fix)


def _keys(table: Mapping[str, Any], prefix: str = "") -> dict[str, str]:
    """Returns key to value of all tables, such as `train.steps`, as JSON writes values."""
    found: dict[str, str] = {}
    for name, value in table.items():
        if isinstance(value, dict) and value:
            found |= _keys(value, f"{prefix}{name}.")
        else:
            found[prefix + name] = json.dumps(value, default=str)
    return found
