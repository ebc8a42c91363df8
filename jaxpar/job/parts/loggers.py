"""The objects that a job's metrics go to besides, as it names them."""

import inspect
from typing import Any

from jaxpar.errors import refuse, users_code
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job


def resolve_loggers(job: Job) -> list[Any]:
    """Returns the loggers of a job; a class or a function is called for one.

    Raises:
      JaxparError: If there is no such object, it cannot be made, or it has no method `log`.
    """
    return [_logger(job, name) for name in job.metrics.loggers]


def check_loggers(job: Job) -> None:
    """Refuses loggers that there are not; none is made.

    Raises:
      JaxparError: If there is no such object, or it has no method `log`.
    """
    for name in job.metrics.loggers:
        found = import_object(name, "metrics.loggers", allowed=job.allow_import)
        if not inspect.isfunction(found):
            _check(name, found)


def _logger(job: Job, name: str) -> Any:
    found = import_object(name, "metrics.loggers", allowed=job.allow_import)
    if inspect.isclass(found) or inspect.isfunction(found):
        with users_code(f"metrics.loggers: {name}()", rule="a logger can be made", fix="one that takes no arguments"):
            found = found()
    _check(name, found)
    return found


def _check(name: str, found: Any) -> None:
    if not callable(getattr(found, "log", None)):
        raise refuse(
            f"metrics.loggers: {name} is a {type(found).__name__} without a method `log`",
            rule="a logger is an object with log(step, values)",
            fix="def log(self, step, values): ...",
        )
