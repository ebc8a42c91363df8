"""Python objects that a job names, `package.module:name`: importing one runs its module, so a job may not name any.

my_models:Net          from the working directory's own modules: yes
subprocess:run         from what is installed, or Python's own: with --allow-import
my_models:os.system    the same, whoever imported it
"""

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

from jaxpar.errors import JaxparError, describe_exception, nearest, refuse


def import_object(name: str, key: str, *, allowed: bool) -> Any:
    """Returns the object that `package.module:name` names; the working directory is searched first.

    Args:
      name: As the job says it.
      key: Of the job, for messages.
      allowed: Whether it may come from anywhere; otherwise only from modules that lie in the working directory, and
        be made there if it is a class or a function.

    Raises:
      JaxparError: If there is none, it may not be imported, or its module cannot be.
    """
    module, _, attribute = name.partition(":")
    if not re.fullmatch(r"[\w-]+(\.[\w-]+)*", module) or not attribute:
        raise refuse(
            f"{key} = {name!r}",
            rule='an object has a module and a name: "package.module:Object"',
            fix='"my_module:MyObject"',
        )
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    if not allowed and (where := _elsewhere(module)):
        raise _refused(f"{key} = {name!r}: {module.split('.')[0]} {where}")
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name and not f"{module}.".startswith(f"{error.name}."):  # it is there, and imports what is not
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
            found = getattr(found, word)
            maker = found.__name__ if isinstance(found, ModuleType) else _maker(found)
            if not allowed and maker and (where := _elsewhere(maker)):
                raise _refused(f"{key} = {name!r}: {word} is of {maker}, which {where}")
    except AttributeError as error:
        public = [word for word in vars(importlib.import_module(module)) if not word.startswith("_")]
        fix = nearest(attribute, public) if public else f"define {attribute} in {module}"
        raise refuse(
            f"{key} = {name!r}: module {module!r} has no {attribute!r}", rule="the module has such an object", fix=fix
        ) from error
    return found


def _maker(found: Any) -> str | None:
    """Returns the module that defines a class or a function; for another object, the module that holds it."""
    made = inspect.isclass(found) or inspect.isroutine(found)
    return str(getattr(found, "__module__", None) or "builtins") if made else None


def _refused(got: str) -> JaxparError:
    return refuse(
        got,
        rule="a job names Python objects of the working directory's own modules; importing others may run anything",
        fix="--allow-import, or load(..., allow_import=True), if you trust the job",
    )


def _elsewhere(module: str) -> str | None:
    """Returns where a module's package lies if that is not the working directory; nothing is imported to know."""
    top = module.split(".")[0]
    try:
        spec = find_spec(top)
    except ValueError:  # a module that was not found by import, such as __main__
        return "was not imported from a file"
    if spec is None:  # the import says so
        return None
    places = _places(spec)
    if not places:
        return "is built into Python"
    own = Path.cwd().resolve()
    below = [path for path in _installed() if path.is_relative_to(own)]  # such as a virtual environment
    for place in places:
        if not place.is_relative_to(own) or any(place.is_relative_to(path) for path in below):
            return f"lies in {place}, not among the modules of {own}"
    return None


def _places(spec: ModuleSpec) -> list[Path]:
    """Returns where the files of a module are; none where it has no files."""
    if spec.submodule_search_locations is not None:
        return [Path(path).resolve() for path in spec.submodule_search_locations]
    return [Path(spec.origin).resolve()] if spec.has_location and spec.origin else []


def _installed() -> list[Path]:
    """Returns where Python and its packages are installed."""
    known = (sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib"))
    return [Path(path).resolve() for path in (*known, *site.getsitepackages(), site.getusersitepackages())]
