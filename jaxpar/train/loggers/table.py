"""The table of loggers by name; a library is imported when its logger is opened."""

from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

from jaxpar.errors import JaxparError, refuse, suggest
from jaxpar.train.loggers import services


@dataclass(frozen=True)
class LoggerEntry:
    """A row of the table.

    Attributes:
      kind: The class.
      libraries: The modules that must be installed.
    """

    kind: type
    libraries: tuple[str, ...]


LOGGERS = {
    "tensorboard": LoggerEntry(services.TensorBoard, ("tensorboardX",)),
    "wandb": LoggerEntry(services.WeightsAndBiases, ("wandb",)),
    "mlflow": LoggerEntry(services.MLflow, ("mlflow", "sqlalchemy", "alembic")),
    "trackio": LoggerEntry(services.Trackio, ("trackio",)),
}


def check_name(name: str, key: str) -> None:
    """Checks that a logger of this name exists and that its library is installed.

    Args:
      name: The name.
      key: The job's key or the argument, for messages.

    Raises:
      JaxparError: If there is none, or a module is not installed.
    """
    if name not in LOGGERS:
        raise refuse(
            f"{key} = {name!r}",
            rule=f'a logger is {", ".join(LOGGERS)}, or "package.module:Object" with log(step, values)',
            fix=suggest(name, LOGGERS),
        )
    missing = [module for module in LOGGERS[name].libraries if find_spec(module) is None]
    if missing:
        raise missing_library(name, key, missing[0])


def missing_library(name: str, key: str, module: str) -> JaxparError:
    """Returns the error of a logger whose library is not installed."""
    return refuse(
        f"{key} = {name!r} without {module}",
        rule=f"the logger {name} writes by the package {module}, which is not installed",
        fix=f"pip install 'jaxpar[{name}]'",
    )


def open_logger(name: str, key: str) -> Any:
    """Returns the logger of a name; nothing is written before its `begin`.

    Raises:
      JaxparError: As `check_name`.
    """
    check_name(name, key)
    return LOGGERS[name].kind()
