"""The protocol of a logger, the run as it sees it, its ids in RUN/loggers.json, and the calls of a run's loggers."""

import json
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from jaxpar.errors import JaxparError, file_errors, user_code_errors
from jaxpar.files import write_json

IDS = "loggers.json"


@dataclass(frozen=True, kw_only=True)
class LoggedRun:
    """The run as a logger sees it when it begins.

    Attributes:
      folder: The run folder.
      config: Values by key: the job's keys such as `train.steps`, versions, and the path of the report.
      texts: Texts by name: `job` (TOML) and `layout` (`Layout.explain()`).
      step: The step that the run goes on from; 0 for a new run.
      repeats: Whether the next steps have the values that they had before, as after a kill; False after a rollback,
        and if the run goes on with other settings.
    """

    folder: Path
    config: Mapping[str, Any] = field(default_factory=dict)
    texts: Mapping[str, str] = field(default_factory=dict)
    step: int = 0
    repeats: bool = True

    @property
    def name(self) -> str:
        """The name of the run folder."""
        return self.folder.resolve().name

    def rows(self) -> Iterator[tuple[int, dict[str, float]]]:
        """Yields (step, values) of each row of RUN/metrics.jsonl, without values that are no number."""
        file = self.folder / "metrics.jsonl"
        if not file.exists():
            return
        with file.open(encoding="utf-8") as lines:
            for line in lines:
                row = json.loads(line)
                yield row.pop("step"), {name: value for name, value in row.items() if value is not None}


class Logger(Protocol):
    """A logger; of a user's own, only `log` is required."""

    def begin(self, run: LoggedRun) -> None:
        """Opens the logger, or moves it back to `run.step`; then it shows the rows of `run.rows()` and no later one."""
        ...

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Writes the values of a step; a second call of a step has its evaluation."""
        ...

    def close(self) -> None:
        """Writes all that is pending."""
        ...


def load_ids(run: LoggedRun, logger: str) -> list[str]:
    """Returns the ids that a logger gave the run, the newest last.

    Raises:
      JaxparError: If RUN/loggers.json is damaged.
    """
    file = run.folder / IDS
    if not file.exists():
        return []
    with file_errors(file, rule="loggers.json has the ids of the run in its loggers", fix=f"mv {file} {file}.damaged"):
        return [str(name) for name in json.loads(file.read_text(encoding="utf-8")).get(logger, [])]


def save_id(run: LoggedRun, logger: str, name: str) -> str:
    """Adds the newest id of a run in a logger to RUN/loggers.json, and returns it."""
    file = run.folder / IDS
    ids = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {}
    write_json(file, ids | {logger: [*load_ids(run, logger), name]})
    return name


def new_id() -> str:
    """Returns a random id of 8 characters."""
    return secrets.token_hex(4)


class LoggerCalls:
    """The loggers of a run: if one raises, the run reports it once and goes on without it or with the next row.

    Args:
      loggers: Objects with `log(step, values)`, and optionally `begin(run)` and `close()`.
      file: The file that has all rows, for messages.
      say: Prints the first failure of a logger, and at the end the number of its failures.
    """

    def __init__(self, loggers: Sequence[Any], file: object, say: Callable[[str], None]):
        self._loggers, self._file, self._say = loggers, file, say
        self._failures = [0] * len(loggers)
        self._open = [True] * len(loggers)

    def begin(self, run: LoggedRun) -> None:
        """Opens the loggers, or moves them back; one that raises gets no row of this run."""
        for i, logger in enumerate(self._loggers):
            if hasattr(logger, "begin"):
                self._open[i] = self._call(i, "begin(run)", partial(logger.begin, run))

    def log(self, step: int, values: Mapping[str, Any]) -> None:
        """Sends a row to each logger."""
        for i, logger in enumerate(self._loggers):
            if self._open[i]:
                self._call(i, f"log({step}, ...)", partial(logger.log, step, dict(values)))

    def close(self) -> None:
        """Closes the loggers."""
        for i, logger in enumerate(self._loggers):
            if hasattr(logger, "close"):
                self._call(i, "close()", logger.close)
            if self._failures[i] > 1:
                self._say(f"{type(logger).__name__} raised {self._failures[i]} times")

    def _call(self, index: int, what: str, call: Callable[[], Any]) -> bool:
        """Calls a method of a logger and reports its first failure; returns whether it succeeded."""
        try:
            with user_code_errors(
                f"{type(self._loggers[index]).__name__}.{what}",
                rule="a logger takes each row: log(step, values)",
                fix="the line of the logger that this names",
            ):
                call()
        except JaxparError as error:
            self._failures[index] += 1
            if self._failures[index] == 1:
                self._say(f"{error.problems[0].got}; training goes on, {self._file} has all rows")
            return False
        return True
