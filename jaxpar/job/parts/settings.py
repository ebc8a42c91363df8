"""Settings of a model that are objects: a table or an import path becomes the config that the model takes.

[model.config]                          config: Config in the model's signature   ─► Config(layers=2)
layers = 2
[model.config]                          any signature                             ─► mine.Config(layers=2)
name = "mine:Config"
layers = 2
config = "mine:small"                   what the module has, a Config or a function that returns one

The types in a signature are looked up, so that quoted ones and `from __future__ import annotations` do as well.
"""

import inspect
import re
import typing
from collections.abc import Callable, Mapping
from typing import Any

from jaxpar.errors import users_code
from jaxpar.job.file.import_object import import_object
from jaxpar.job.file.schema import Job

_PATH = re.compile(r"[\w.-]+:[\w.]+")


def given(job: Job, target: Callable, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Returns settings as a model takes them.

    Args:
      job: Whose settings they are.
      target: The model's class or function.
      settings: As the job says them.

    Raises:
      JaxparError: If a config cannot be imported, or does not take its table.
    """
    hints = _hints(target)
    return {key: _object(job, key, hints.get(key), value) for key, value in settings.items()}


def _object(job: Job, key: str, hint: Any, value: Any) -> Any:
    """Returns a setting, made into an object where it names one, or the model wants one."""
    if isinstance(value, str) and hint is not str and _PATH.fullmatch(value):
        found = import_object(value, f"model.{key}", allowed=job.allow_import)
        return _made(key, value, found, {}) if inspect.isclass(found) or inspect.isfunction(found) else found
    if not isinstance(value, dict):
        return value
    name = value.get("name")
    if isinstance(name, str) and _PATH.fullmatch(name):
        found = import_object(name, f"model.{key}.name", allowed=job.allow_import)
        return _made(key, name, found, {own: each for own, each in value.items() if own != "name"})
    if inspect.isclass(hint) and not issubclass(hint, Mapping):
        return _made(key, hint.__name__, hint, value)
    return value


def _made(key: str, name: str, target: Any, settings: dict[str, Any]) -> Any:
    with users_code(
        f"model.{key} = {name}({', '.join(settings)})",
        rule=f"[model.{key}] has what {name} takes",
        fix=f"its keys: {', '.join(inspect.signature(target).parameters)}" if callable(target) else "name a class",
    ):
        return target(**settings)


def _hints(target: Callable) -> dict[str, Any]:
    """Returns the types of a model's settings, those that can be looked up."""
    made_by: Any = target.__init__ if inspect.isclass(target) else target
    try:
        return typing.get_type_hints(made_by)
    except (NameError, TypeError, AttributeError):  # of names for type checkers alone
        return {}
