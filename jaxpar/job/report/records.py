"""The types of what a run has written: a file that was altered is refused by name before a page is made of it."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from jaxpar.errors import JaxparError, refuse

NUMBERS = ("tokens", "seconds", "tokens_per_second", "input_wait_seconds")  # of a row, where they are
LARGEST = 1e18  # of a number on a page
LATEST = 1e11  # seconds since 1970, in the year 5138
TABLES = ("mesh", "versions", "layout", "peak")  # of run.json, where they are


def check_metrics(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Checks that steps and what is summed of them are numbers, and that every number can be drawn.

    Raises:
      JaxparError: With the first row that is otherwise.
    """
    for row in rows:
        wrong = [name for name in ("step", *NUMBERS) if row.get(name) is not None and not _is_number(row[name])]
        wrong += [name for name, value in row.items() if isinstance(value, int) and not _is_number(value, flags=True)]
        if not _is_number(row.get("step"), whole=True):
            wrong = ["step", *wrong]
        if wrong:
            raise _altered(path, f"step {row.get('step')!r:.40} has {wrong[0]} = {_shown(row.get(wrong[0]))}")


def check_events(path: Path, events: Iterable[Mapping[str, Any]]) -> None:
    """Checks that steps and times of what was said are numbers.

    Raises:
      JaxparError: With the first that is otherwise.
    """
    for each in events:
        step, time = each.get("step"), each.get("time")
        if step is not None and not _is_number(step, whole=True):
            raise _altered(path, f"step = {_shown(step)}")
        if time is not None and not (_is_number(time) and 0 <= time < LATEST):
            raise _altered(path, f"time = {_shown(time)}")


def check_facts(path: Path, facts: Mapping[str, Any]) -> None:
    """Checks the tables and numbers of run.json that a page reads.

    Raises:
      JaxparError: With the first that is otherwise.
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
