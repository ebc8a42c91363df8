"""Measures and loggers that a job names."""

import inspect
from collections.abc import Callable
from typing import Any

from jaxpar.errors import refuse, suggest, user_code_errors
from jaxpar.job.file.imports import import_object
from jaxpar.job.file.schema import Job
from jaxpar.step.evaluation_loss import DERIVED, MEASURES
from jaxpar.train.loggers.services import check_name, open_logger

KEY, LOGGERS_KEY = "metrics.evaluate", "metrics.loggers"


def resolve_measures(job: Job) -> dict[str, Callable]:
    """Returns the metric functions of (model, batch) by name, without those that the loss itself provides.

    Raises:
      JaxparError: If a function does not exist, or two share a name.
    """
    functions: dict[str, Callable] = {}
    for name in job.metrics.evaluate:
        if name in DERIVED or (name == "accuracy" and job.train.loss == "classify"):
            continue
        metric = name.rpartition(":")[2].rpartition(".")[2]
        if metric in functions or (metric != name and metric in (*DERIVED, *MEASURES)):
            raise refuse(
                f"{KEY}: {name!r}",
                rule="each metric has a name of its own",
                fix="a function of another name, or one of the two alone",
            )
        functions[metric] = _function(job, name)
    return functions


def derived_metrics(job: Job) -> tuple[str, ...]:
    """Returns the names of a job's metrics that are derived from its loss.

    Raises:
      JaxparError: If bits per byte are requested and tokens are not bytes.
    """
    names = tuple(name for name in job.metrics.evaluate if name in DERIVED)
    if "bits_per_byte" in names and not (job.data.is_text and job.data.tokenizer == "bytes"):
        raise refuse(
            f'{KEY} = ["bits_per_byte"] with {job.data.tokenizer if job.data.is_text else job.data.source}',
            rule="bits per byte are those per token where a token is a byte of text",
            fix='"perplexity", or data.tokenizer = "bytes"',
        )
    return names


def evaluation_set_names(job: Job) -> tuple[str, ...]:
    """Returns the names of the evaluation sets of a job; "" stands for the held-out examples, if there are any."""
    has_held_out = job.data.held_out > 0 if ":" not in job.data.source or not job.data.sets else True
    return (*[""] * has_held_out, *job.data.sets)


def _function(job: Job, name: str) -> Callable:
    if ":" not in name:
        if name not in MEASURES:
            names = [*MEASURES, *DERIVED]
            rule = f'a metric is {", ".join(names)}, or "package.module:function" of (model, batch) to (sum, count)'
            raise refuse(f"{KEY}: {name!r}", rule=rule, fix=suggest(name, names))
        return MEASURES[name]
    target = import_object(name, KEY, allowed=job.allow_import)
    if not callable(target):
        raise refuse(
            f"{KEY}: {name!r} is a {type(target).__name__}",
            rule="a metric is a function of (model, batch) to (sum, count)",
            fix='"my_module:my_function", the name of such a function',
        )
    return target


# Additional metric loggers named in the job.


def resolve_loggers(job: Job) -> list[Any]:
    """Creates the loggers of a job; a class or function is called without arguments.

    Raises:
      JaxparError: If a name is unknown or its library not installed; if an object does not exist, cannot be created, or
        has no method `log`.
    """
    return [_logger(job, name) for name in job.metrics.loggers]


def check_loggers(job: Job) -> None:
    """Checks the loggers of a job without creating any.

    Raises:
      JaxparError: If a name is unknown or its library not installed; if an object does not exist, or has no method
        `log`.
    """
    for name in job.metrics.loggers:
        if ":" not in name:
            check_name(name, LOGGERS_KEY)
            continue
        target = import_object(name, LOGGERS_KEY, allowed=job.allow_import)
        if not inspect.isfunction(target):
            _check(name, target)


def _logger(job: Job, name: str) -> Any:
    if ":" not in name:
        return open_logger(name, LOGGERS_KEY)
    logger = import_object(name, LOGGERS_KEY, allowed=job.allow_import)
    if inspect.isclass(logger) or inspect.isfunction(logger):
        with user_code_errors(
            f"metrics.loggers: {name}()", rule="a logger can be made", fix="one that takes no arguments"
        ):
            logger = logger()
    _check(name, logger)
    return logger


def _check(name: str, found: object) -> None:
    if not callable(getattr(found, "log", None)):
        raise refuse(
            f"metrics.loggers: {name} is a {type(found).__name__} without a method `log`",
            rule="a logger is an object with log(step, values)",
            fix="def log(self, step, values): ...",
        )
