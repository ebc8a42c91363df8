"""Reads checkpoints that Orbax wrote for an older jaxpar, and writes Orbax checkpoints for other programs.

Only this file imports Orbax, whose v1 API is not stable yet.
"""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import jax

from jaxpar.checkpoint.manifest import Array
from jaxpar.errors import refuse
from jaxpar.files import check_local

# exceptions of Orbax and TensorStore for a file that is missing, truncated or replaced
UNREADABLE = (OSError, ValueError, KeyError, TypeError, AttributeError, RuntimeError)


def load(folder: Path, names: Iterable[str], wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, Any]:
    """Loads arrays of a checkpoint with the given shardings.

    Args:
      folder: The checkpoint.
      names: The paths of all arrays in it.
      wanted: Path to shape, dtype and sharding of the arrays to load; a saved array is cast to this dtype.

    Raises:
      JaxparError: If Orbax cannot read it.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        result = ocp.load(str(folder.resolve()), {_key(name): wanted.get(name, ...) for name in names})
    except UNREADABLE as error:
        raise refuse(
            f"checkpoint {folder} cannot be read: {str(error).splitlines()[0]:.120}",
            rule="a checkpoint can be read by the installed version of Orbax",
            fix=f"pip install orbax-checkpoint==VERSION, the one that {folder.parent.parent}/run.json names",
        ) from error
    return {name: result[_key(name)] for name in wanted}


def save(folder: Path, tree: Any) -> None:
    """Writes a tree of arrays as an Orbax checkpoint.

    Raises:
      JaxparError: If the folder is there already, or cannot be written.
    """
    from orbax.checkpoint import v1 as ocp

    check_local(folder, "--to")
    if folder.exists():
        rule = "--to is a folder that does not exist yet"
        raise refuse(f"--to {folder} is there already", rule=rule, fix=f"--to {folder}-2")
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        ocp.save(str(folder.resolve()), tree)
    except (OSError, ValueError) as error:
        raise refuse(
            f"--to {folder}: {str(error).splitlines()[0]:.120}",
            rule="--to is a folder that can be made, on a disk with enough free space",
            fix="--to a folder that you may write, on a disk with free space for the checkpoint",
        ) from error


def read_metadata(folder: Path) -> tuple[dict[str, Array], dict[str, float]]:
    """Returns arrays and scores from the Orbax metadata of a checkpoint that an older jaxpar wrote.

    Raises:
      JaxparError: If it is no checkpoint, or once had a MANIFEST and lost it.
    """
    from orbax.checkpoint import v1 as ocp

    try:
        metadata = ocp.metadata(str(folder.resolve()))
        arrays, custom = dict(metadata.metadata), dict(metadata.custom_metadata or {})  # pyright: ignore
        descriptions = {
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
    return descriptions, {key: float(value) for key, value in custom.items() if key != "step"}  # pyright: ignore


def _key(path: str) -> str:
    return path.replace(".", "%2E").replace("/", ".")  # Orbax reads `/` as a folder


def _elements(shape: Any) -> int:
    size = 1
    for dim in shape:
        size *= dim
    return size
