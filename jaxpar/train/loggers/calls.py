"""Calls the loggers of a run: if one raises, the run reports it once and goes on without it or with the next row."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from jaxpar.errors import JaxparError, user_code_errors
from jaxpar.train.loggers.base import LoggedRun


class LoggerCalls:
    """The loggers of a run.

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
