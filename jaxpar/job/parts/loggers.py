"""Additional metric loggers named in the job."""

import inspect
from typing import Any

from jaxpar.errors import refuse, user_code_errors
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job


def resolve_loggers(job: Job) -> list[Any]:
    """Creates the loggers of a job; a class or function is called without arguments.

    Raises:
      JaxparError: If an object does not exist, cannot be created, or has no method `log`.
    """
    return [_logger(job, name) for name in job.metrics.loggers]


def check_loggers(job: Job) -> None:
    """Checks the loggers of a job without creating any.

    Raises:
      JaxparError: If an object does not exist, or has no method `log`.
    """
    for name in job.metrics.loggers:
        target = import_object(name, "metrics.loggers", allowed=job.allow_import)
        if not inspect.isfunction(target):
            _check(name, target)


def _logger(job: Job, name: str) -> Any:
    logger = import_object(name, "metrics.loggers", allowed=job.allow_import)
    if inspect.isclass(logger) or inspect.isfunction(logger):
        with user_code_errors(
            f"metrics.loggers: {name}()", rule="a logger can be made", fix="one that takes no arguments"
        ):
            logger = logger()
    _check(name, logger)
    return logger


def _check(name: str, found: Any) -> None:
    if not callable(getattr(found, "log", None)):
        raise refuse(
            f"metrics.loggers: {name} is a {type(found).__name__} without a method `log`",
            rule="a logger is an object with log(step, values)",
            fix="def log(self, step, values): ...",
        )
