"""Opens a user's object as a source, chosen by its methods."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from jaxpar.data.iterables import UserSource, parameters
from jaxpar.data.spec import Data, Source
from jaxpar.data.streams.held_out_data import WithHeldOut, open_held_out
from jaxpar.data.streams.indexed import Columns, GrainMap, Indexed
from jaxpar.data.streams.stateful import Stateful, check_loader
from jaxpar.errors import refuse, user_code_errors


def open_user_data(spec: Data, named: Any, folder: Path, *, seed: int = 0, held: Any = None) -> Source:
    """Opens a user's object as a source.

    Args:
      spec: The `[data]` table; its `source` names the object.
      named: The object.
      folder: Folder of the saved states of streams.
      seed: Seed of the shuffle of indexed examples.
      held: The object that `data.evaluation` names, or None.

    Raises:
      JaxparError: If it is no source.
    """
    name, data, is_fresh = spec.source, named, False
    if isinstance(named, Iterator):
        function_name = getattr(named, "__name__", "batches")
        raise refuse(
            f"data.source = {name!r} is a {type(named).__name__}, which can be read once",
            rule="a source is read from its start again: to check it, and to resume",
            fix=f"name the function that makes it: {function_name}, not {function_name}()",
        )
    if _is_function(named):
        with user_code_errors(
            f"data.source = {name!r}",
            rule="a function of no arguments returns an iterable of batches; of (shard, shards) one of that shard",
            fix="give its arguments defaults",
        ):
            data, is_fresh = named(**({"shard": 0, "shards": 1} if _takes_shards(named) else {})), True
    if held is None and not _has_batch(data) and callable(getattr(data, "evaluation", None)):
        held = data.evaluation
    source = _source(spec, named if is_fresh else None, data, folder, seed)
    return (
        source if held is None else WithHeldOut(source, open_held_out(held, spec.evaluation or f"{name}'s evaluation"))
    )


def _source(spec: Data, function: Callable | None, made: Any, folder: Path, seed: int) -> Source:
    name = spec.source
    if _has_batch(made):
        return UserSource(made, name)
    if _is_of("grain", made, "MapDataset"):
        return GrainMap(made, name)
    if isinstance(made, Mapping):
        return Indexed(Columns(made, name), name, spec, seed)
    if is_indexed(made):
        return Indexed(made, name, spec, seed)
    if not isinstance(made, Iterable):
        raise refuse(
            f"data.source = {name!r} is a {type(made).__name__}",
            rule="a source is an iterable of batches, a function that returns one, or has batch(step, size)",
            fix="yield {'inputs': ..., 'targets': ...} from a generator function",
        )
    check_loader(made, name, fresh=function is not None)
    return Stateful(function or partial(_same, made), name, folder)


def is_indexed(made: Any) -> bool:
    """Whether an object is a map-style dataset; a list is an iterable of batches instead."""
    return hasattr(made, "__getitem__") and hasattr(made, "__len__") and not isinstance(made, _ITERABLES | type)


_ITERABLES = list | tuple | dict | str | bytes | np.ndarray


def _same(made: Any) -> Any:
    return made


def _has_batch(made: Any) -> bool:
    """Whether an object has jaxpar's `batch(step, size)`; grain's and Hugging Face's `batch(size)` are excluded."""
    has_method = callable(getattr(made, "batch", None)) and not isinstance(made, type)
    return has_method and not any(_is_of(package, made, kind) for package, kinds in _OTHERS.items() for kind in kinds)


_OTHERS = {  # package to its classes with a method `batch(size)`
    "grain": ("MapDataset", "IterDataset"),
    "datasets": ("Dataset", "IterableDataset", "DatasetDict", "IterableDatasetDict"),
}


def _is_of(package: str, made: Any, kind: str) -> bool:
    return any(base.__name__ == kind and base.__module__.startswith(f"{package}.") for base in type(made).__mro__)


def _is_function(named: Any) -> bool:
    return callable(named) and not _has_batch(named) and not is_indexed(named) and not isinstance(named, Iterable)


def _takes_shards(function: Any) -> bool:
    return {"shard", "shards"} <= set(parameters(function))
