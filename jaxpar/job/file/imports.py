"""Imports objects that a job names outside of its file: Python objects `package.module:name`, a Hugging Face folder.

An import runs code, so the origin is restricted:

    my_models:Net          a module in the working directory: allowed
    subprocess:run         an installed or standard-library module: only with --allow-import
    my_models:os.system    the same, although my_models imported it

If a job's model is a Hugging Face folder, its config.json gives the settings, and the run starts from its weights:

    [model]                    [model]
    name = "my-llama"    ─►    name = "decoder", and the settings of my-llama/config.json
                               [checkpoint]
                               start_from = "my-llama"
"""

import dataclasses
import importlib
import inspect
import re
import site
import sys
import sysconfig
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType
from typing import Any

from jaxpar.errors import JaxparError, Problem, describe_exception, refuse, suggest
from jaxpar.models.huggingface.config import read_settings
from jaxpar.models.huggingface.folder import CONFIG, hub_download, is_folder, model_table, newest_snapshot, read_config
from jaxpar.models.settings.reference_models import MODELS

OWN = ("dropout", "scan")  # jaxpar's own settings, absent from config.json; they do not change a trained model


def import_object(name: str, key: str, *, allowed: bool) -> Any:
    """Imports the object that `package.module:name` names; the working directory is searched first.

    Args:
      name: The import path.
      key: The job's key, for messages.
      allowed: Whether any module is allowed; otherwise only modules in the working directory, and classes and
        functions must be defined there.

    Raises:
      JaxparError: If the object does not exist, is not allowed, or its module cannot be imported.
    """
    module, _, attribute = name.partition(":")
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", module) or not attribute:
        raise refuse(
            f"{key} = {name!r}",
            rule='an object is named by its module, a colon and its name: "package.module:Object"',
            fix='"my_module:MyObject"',
        )
    directory = str(Path.cwd())
    if directory not in sys.path:
        sys.path.insert(0, directory)
    if not allowed and (origin := _outside_origin(module)):
        raise _not_allowed(f"{key} = {name!r}: {module.split('.')[0]} {origin}")
    try:
        result = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):  # one of its imports is missing
            raise refuse(
                f"{key} = {name!r}: {module} imports {error.name}, which is not there: {describe_exception(error)}",
                rule="a module's own imports are installed, or found from the working directory",
                fix=f"install {error.name}; python -c 'import {module}' shows who imports it",
            ) from error
        raise refuse(
            f"{key} = {name!r}: {error}",
            rule="the module is found from the working directory or installed",
            fix="start jaxpar where the module lies",
        ) from error
    except (Exception, SystemExit) as error:  # an import runs the user's code
        raise refuse(
            f"{key} = {name!r}: {describe_exception(error)}",
            rule="the module can be imported",
            fix=f"python -c 'import {module}'",
        ) from error
    try:
        for word in attribute.split("."):
            result = getattr(result, word)
            maker = result.__name__ if isinstance(result, ModuleType) else _maker(result)
            if not allowed and maker and (origin := _outside_origin(maker)):
                raise _not_allowed(f"{key} = {name!r}: {word} is of {maker}, which {origin}")
    except AttributeError as error:
        public = [word for word in vars(importlib.import_module(module)) if not word.startswith("_")]
        fix = suggest(attribute, public) if public else f"define {attribute} in {module}"
        raise refuse(
            f"{key} = {name!r}: module {module!r} has no {attribute!r}", rule="the module has such an object", fix=fix
        ) from error
    return result


def _maker(found: object) -> str | None:
    """Returns the module that defines a class or a function; for another object, the module that holds it."""
    is_definition = inspect.isclass(found) or inspect.isroutine(found)
    return str(getattr(found, "__module__", None) or "builtins") if is_definition else None


def _not_allowed(got: str) -> JaxparError:
    return refuse(
        got,
        rule="a job names Python objects of the working directory's own modules; importing others may run anything",
        fix="--allow-import, or load(..., allow_import=True), if you trust the job",
    )


def _outside_origin(module: str) -> str | None:
    """Says where a module lies outside the working directory, without importing it; None if inside, or not found."""
    top = module.split(".")[0]
    try:
        spec = find_spec(top)
    except ValueError:  # a module without a spec, such as __main__
        return "was not imported from a file"
    if spec is None:  # the import reports it
        return None
    places = _places(spec)
    if not places:
        return "is built into Python"
    directory = Path.cwd().resolve()
    environments = [
        path for path in _library_folders() if path.is_relative_to(directory)
    ]  # such as a virtual environment
    for place in places:
        if not place.is_relative_to(directory) or any(place.is_relative_to(path) for path in environments):
            return f"lies in {place}, not among the modules of {directory}"
    return None


def _places(spec: ModuleSpec) -> list[Path]:
    """Returns the folders or the file of a module; [] if it has none."""
    if spec.submodule_search_locations is not None:
        return [Path(path).resolve() for path in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.has_location and spec.origin else []


def _library_folders() -> list[Path]:
    paths = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [Path(path).resolve() for path in (*paths, *site.getsitepackages(), site.getusersitepackages())]


def expand_model_folder(raw: dict[str, Any]) -> tuple[dict[str, Any], list[Problem]]:
    """Replaces a model folder by its settings in the tables of a job; other jobs are returned unchanged."""
    model = raw.get("model")
    if not isinstance(model, dict):
        return raw, []
    name = model.get("name")
    if not isinstance(name, str) or name in MODELS or ":" in name or not is_folder(name):
        return raw, []
    try:
        _, config = read_settings(read_config(Path(name).expanduser() / CONFIG))
    except JaxparError as error:
        return raw | {"model": {"name": "decoder"}}, list(error.problems)
    settings = {key: value for key, value in dataclasses.asdict(config).items() if key not in OWN}
    checkpoint = raw.get("checkpoint", {})
    if isinstance(checkpoint, dict):
        checkpoint = {"start_from": name, **checkpoint}
    return raw | {"model": model_table(settings, model), "checkpoint": checkpoint}, []


def unknown_model_problem(name: str) -> Problem:
    """Describes a `model.name` that is no jaxpar model, no import path and no model folder."""
    got = f"model.name = {name!r:.200}"
    rule = f'a model is {", ".join(MODELS)}, "package.module:Object", or a folder with a config.json'
    path_fallback = "the path of a folder that is there"
    if download := hub_download(name):
        path_fallback = f'{download[0]}, and name = "{download[1]}"; or {path_fallback}'
    if "://" in name:
        on_disk = f'name = "{name.removeprefix("file://")}"' if name.startswith("file://") else path_fallback
        return Problem(f"{got}, an address", rule, on_disk)
    try:
        path = Path(name).expanduser()
        is_file, is_directory = path.is_file(), path.is_dir()
        parent = path.parent if path.parent.is_dir() else None
        siblings = [str(file.parent) for file in parent.glob(f"*/{CONFIG}")] if parent else []
    except (OSError, RuntimeError, ValueError) as error:  # too long, an unknown ~user, or a null byte
        return Problem(f"{got}: {getattr(error, 'strerror', None) or error}", rule, suggest(name, MODELS))
    if is_file:
        is_model = is_folder(path.parent)
        fix = f'name = "{path.parent}"' if is_model else "the folder that save_pretrained of transformers has written"
        return Problem(f"{got} is a file", rule, fix)
    if is_directory:
        snapshot = newest_snapshot(path)
        written = "the folder that save_pretrained of transformers has written"
        return Problem(f"{got} is a folder without {CONFIG}", rule, f'name = "{snapshot}"' if snapshot else written)
    if path.parent == Path() and not name.startswith((".", "~")):  # it may be meant as a model or as a folder
        fallback = f"one of: {', '.join(sorted(MODELS))}; or the path of a folder that is there"
        return Problem(f"{got}, no such model or folder", rule, suggest(name, [*MODELS, *siblings], otherwise=fallback))
    return Problem(f"{got}: no such folder", rule, suggest(str(path), siblings, otherwise=path_fallback))
