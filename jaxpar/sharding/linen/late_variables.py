"""Refuses variables that a Linen module makes in a call, and not in its init: a compiled step cannot grow its state."""

import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flax import linen as nn
from flax.errors import ModifyScopeVariableError, ScopeCollectionNotFound

from jaxpar.errors import JaxparError, refuse
from jaxpar.sharding.linen.sow import Path


@contextmanager
def known_collections(module: nn.Module, state: Mapping[str, Any]) -> Iterator[None]:
    """Refuses a variable of a collection that init does not make: Flax has no place for it in a call."""
    try:
        yield
    except (ScopeCollectionNotFound, ModifyScopeVariableError) as error:
        collection = re.search(r'collection "(\w+)"', str(error))
        if collection is None or collection[1] in ("params", *state):
            raise
        raise _made_late(module, f"a variable of the collection {collection[1]}") from error


def check_variables(module: nn.Module, before: Mapping[str, Any], after: Mapping[str, Any]) -> None:
    """Refuses variables that a call made.

    Args:
      module: The module.
      before: Its collections before the call.
      after: Its collections after the call.

    Raises:
      JaxparError: With the first such variable.
    """
    if late := next(_late(before, after), ""):
        raise _made_late(module, f"the variable {late}")


def has_path(tree: Any, path: Path) -> bool:
    """Whether a nested dict has a value at a path."""
    for name in path:
        if not isinstance(tree, dict) or name not in tree:
            return False
        tree = tree[name]
    return True


def _late(before: Mapping[str, Any], after: Mapping[str, Any], prefix: str = "") -> Iterator[str]:
    for name, value in after.items():
        if name not in before:
            yield prefix + name
        elif isinstance(value, dict) and isinstance(before[name], dict):
            yield from _late(before[name], value, f"{prefix}{name}/")


def _made_late(module: nn.Module, variable: str) -> JaxparError:
    return refuse(
        f"{type(module).__name__} makes {variable} while it is called, and not in its init",
        rule="state that lasts is there from the start: a compiled step cannot grow it",
        fix="self.variable(...) in init too, not behind `if not self.is_initializing()`; self.sow(...) for what only "
        "this call needs",
    )
