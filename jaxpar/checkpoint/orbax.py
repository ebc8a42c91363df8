"""Arrays of a state to files and back. Only this file and `leak` know Orbax: its v1 module still moves."""

import logging
import sys
import warnings
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from jaxpar.checkpoint import leak
from jaxpar.checkpoint.manifest import Array
from jaxpar.errors import refuse
from jaxpar.sharding.names import path_of

# what Orbax and TensorStore raise where a file is missing, cut off or another
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def flat(state: Any) -> dict[str, Any]:
    """Returns a state as path to array, `params/blocks/mlp/up`: a checkpoint does not depend on Python classes."""
    return {path_of(keys): leaf for keys, leaf in jax.tree_util.tree_flatten_with_path(state)[0]}


def unflat(like: Any, arrays: Mapping[str, Any]) -> Any:
    """Returns the tree of `like` with the arrays at its paths."""
    leaves, tree = jax.tree_util.tree_flatten_with_path(like)
    return jax.tree.unflatten(tree, [arrays[path_of(keys)] for keys, _ in leaves])


def described(state: Any) -> dict[str, Array]:
    """Returns shape, dtype and bytes of every array of a state, which may be abstract."""
    return {
        path: Array(tuple(leaf.shape), str(leaf.dtype), leaf.size * leaf.dtype.itemsize)
        for path, leaf in flat(state).items()
    }


def save(folder: Path, state: Any, step: int) -> Any:
    """Starts writing a state; returns, once its arrays are copied, a future with `.result()`."""
    from orbax.checkpoint import v1 as ocp

    _quiet()
    leak.stop()
    # what is in flight must not alias buffers that the next step takes over
    jax.block_until_ready(state)
    plain = {_key(path): leaf for path, leaf in flat(state).items()}
    return ocp.save_async(str(folder), plain, custom_metadata={"step": step, "jaxpar": 1})


def load(folder: Path, names: Iterable[str], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Returns arrays of a checkpoint, each where its sharding says.

    Args:
      folder: The checkpoint.
      names: The paths of all arrays in it.
      wanted: Path to shape, dtype and sharding of those that are read; another dtype is converted to.

    Raises:
      JaxparError: If Orbax cannot read it.
    """
    from orbax.checkpoint import v1 as ocp

    leak.stop()
    try:
        read = ocp.load(str(folder.resolve()), {_key(name): wanted.get(name, ...) for name in names})
    except UNREADABLE as error:
        raise refuse(
            f"checkpoint {folder} cannot be read: {str(error).splitlines()[0]:.120}",
            rule="a checkpoint can be read by the installed version of Orbax",
            fix=f"the versions that {folder.parent.parent}/run.json names",
        ) from error
    return {name: read[_key(name)] for name in wanted}


def unlisted(folder: Path) -> tuple[dict[str, Array], dict[str, float]]:
    """Returns arrays and scores of a checkpoint that an older jaxpar wrote, as Orbax lists them.

    Raises:
      JaxparError: If it is none, or this jaxpar wrote it and its list was lost.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        found = ocp.metadata(str(folder.resolve()))
        arrays, custom = dict(found.metadata), dict(found.custom_metadata or {})  # pyright: ignore
        listed = {
            name.replace(".", "/"): Array(
                tuple(array.shape), str(array.dtype), array.dtype.itemsize * _elements(array.shape)
            )
            for name, array in arrays.items()
        }
    except UNREADABLE as error:
        raise refuse(
            f"{folder} is no checkpoint: {str(error).splitlines()[0]:.120}",
            rule="a checkpoint without a MANIFEST is one that Orbax can read",
            fix=f"jaxpar checkpoint ls {folder.parent}",
        ) from error
    if "jaxpar" in custom:
        raise refuse(
            f"{folder} had a MANIFEST, and lost it",
            rule="a MANIFEST is made anew only for a checkpoint that never had one",
            fix=f"mv {folder} {folder}.damaged",
        )
    return listed, {key: float(value) for key, value in custom.items() if key != "step"}  # pyright: ignore


def _key(path: str) -> str:
    return path.replace(".", "%2E").replace("/", ".")  # Orbax reads `/` as a folder


def _elements(shape: Any) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size


def _quiet() -> None:
    """Hides the messages that a failed save prints besides the error that it raises."""
    logging.getLogger("absl").addFilter(_no_traceback)
    warnings.filterwarnings("ignore", "coroutine 'async_serialize_from_host", RuntimeWarning)
    if not isinstance(sys.unraisablehook, _NoClosedLoop):
        sys.unraisablehook = _NoClosedLoop(sys.unraisablehook)


@dataclass(frozen=True)
class _NoClosedLoop:
    """Drops what TensorStore cannot tell Orbax of the other files of such a save: its event loop is closed by then."""

    before: Callable[[Any], Any]

    def __call__(self, what: Any) -> None:
        if what.object is not None or str(what.exc_value) != "Event loop is closed":
            self.before(what)


def _no_traceback(record: logging.LogRecord) -> bool:
    """Drops the traceback that Orbax logs of an error that it raises too."""
    return "_SignalingThread.run() raised" not in str(record.msg)
