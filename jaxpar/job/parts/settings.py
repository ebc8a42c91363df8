"""Object-valued model settings: a table or an import path becomes the config object that the model expects.

[model.config]                          config: Config in the model's signature   ─► Config(layers=2)
layers = 2
[model.config]                          any signature                             ─► mine.Config(layers=2)
name = "mine:Config"
layers = 2
config = "mine:small"                   a Config in the module mine, or a function that returns one

Type hints are resolved, so quoted ones and `from __future__ import annotations` work as well.
"""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.errors import user_code_errors
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job

_PATH = re.compile(r"[\w.-]+:[\w.]+")


def convert_settings(job: Job, target: Callable, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Converts a job's model settings to the arguments that the model takes.

    Args:
      job: The job.
      target: The model's class or function.
      settings: The settings of the job's [model] table.

    Raises:
      JaxparError: If a config cannot be imported, or does not accept its table.
    """
    hints = _hints(target)
    return {key: _object(job, key, hints.get(key), value) for key, value in settings.items()}


def _object(job: Job, key: str, hint: Any, value: Any) -> Any:
    """Converts one setting to an object if it names one or the type hint asks for one."""
    if isinstance(value, str) and hint is not str and _PATH.fullmatch(value):
        target = import_object(value, f"model.{key}", allowed=job.allow_import)
        return _call_target(key, value, target, {}) if inspect.isclass(target) or inspect.isfunction(target) else target
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if isinstance(name, str) and _PATH.fullmatch(name):
        target = import_object(name, f"model.{key}.name", allowed=job.allow_import)
        return _call_target(key, name, target, {field: entry for field, entry in value.items() if field != "name"})
    if inspect.isclass(hint) and not issubclass(hint, Mapping):
        return _call_target(key, hint.__name__, hint, value)
    return value


def _call_target(key: str, name: str, target: Any, settings: dict[str, Any]) -> Any:
    with user_code_errors(
        f"model.{key} = {name}({', '.join(settings)})",
        rule=f"[model.{key}] has what {name} takes",
        fix=f"its keys: {', '.join(inspect.signature(target).parameters)}" if callable(target) else "name a class",
    ):
        return target(**settings)


def _hints(target: Callable) -> dict[str, Any]:
    """Returns the type hints of a model's settings, {} if they cannot be resolved."""
    function: Any = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(function)
    except (NameError, TypeError, AttributeError):  # names that only a type checker imports
        return {}
