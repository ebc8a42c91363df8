"""Type checks of the files of a run: an altered file is refused by name before a page is rendered from it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, refuse

NUMBERS = ("tokens", "seconds", "tokens_per_second", "input_wait_seconds")  # optional numbers of a row
LARGEST = 1e18  # largest number on a page
LATEST = 1e11  # seconds since 1970, in the year 5138
TABLES = ("mesh", "versions", "layout", "peak")  # optional tables of run.json


def check_metrics(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
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
            raise _altered(path, f"step {row.get('step')!r:.40} has {errors[0]} = {_shown(row.get(errors[0]))}")


def check_events(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Checks that steps and times of events are numbers.

    Raises:
      JaxparError: With the first bad event.
    """
    for event in events:
        step, time = event.get("step"), event.get("time")
        if step is not None and not _is_number(step, whole=True):
            raise _altered(path, f"step = {_shown(step)}")
        if time is not None and not (_is_number(time) and 0 <= time < LATEST):
            raise _altered(path, f"time = {_shown(time)}")


def check_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Checks the tables and numbers of run.json that a page reads.

    Raises:
      JaxparError: With the first bad value.
    """
    for name in TABLES:
        if facts.get(name) is not None and not isinstance(facts[name], dict):
            raise _altered(path, f"{name} = {_shown(facts[name])}, and no table")
    numbers = {name: facts.get(name) for name in ("parameters",)}
    for table in ("mesh", "peak"):
        numbers |= {f"{table}.{name}": value for name, value in (facts.get(table) or {}).items()}
    for name, value in numbers.items():
        if value is not None and not _is_number(value, whole=name.startswith("mesh.")):
            raise _altered(path, f"{name} = {_shown(value)}, and no number")


def _is_number(value: Any, *, whole: bool = False, flags: bool = False) -> bool:
    if isinstance(value, bool):
        return flags
    if not isinstance(value, int if whole else (int, float)):
        return False
    return value != value or abs(value) <= LARGEST or value in (float("inf"), float("-inf"))


def _shown(value: Any) -> str:
    if isinstance(value, int) and value.bit_length() > 64:
        return f"an integer of {value.bit_length()} bits"
    return f"{value!r:.40}"


def _altered(path: Path, got: str) -> JaxparError:
    return refuse(
        f"{path}: {got}",
        rule="a report reads the files that a run has written",
        fix=f"mv {path} {path}.damaged, or without that line",
    )
