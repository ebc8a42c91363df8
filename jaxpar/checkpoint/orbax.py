"""Writes Orbax checkpoints for other programs.

Only this file imports Orbax, whose v1 API is not stable yet.
"""

from importlib.util import find_spec
from pathlib import Path
from typing import Any

from jaxpar.errors import refuse
from jaxpar.files import check_local


def save(folder: Path, tree: Any) -> None:
    """Writes a tree of arrays as an Orbax checkpoint.

    Raises:
      JaxparError: If Orbax is not installed, or the folder is there already or cannot be written.
    """
    if find_spec("orbax") is None or find_spec("orbax.checkpoint") is None:
        raise refuse(
            "--format orbax without Orbax",
            rule="the package orbax-checkpoint writes this format",
            fix="pip install 'jaxpar[orbax]'",
        )
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
