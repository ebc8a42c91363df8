"""Reads arrays of one checkpoint, and checks every byte that it reads; all processes find the same.

First the MANIFEST, names and sizes of the files: all agree that nothing is missing. Then each process reads what it
needs, and hashes it as it does: all agree that nothing is altered.
"""

from collections.abc import Mapping
from pathlib import Path

import jax

from jaxpar.checkpoint import listing, manifest, orbax, processes
from jaxpar.checkpoint.arrays.load import load
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.errors import JaxparError, Problem


class Damaged(JaxparError):
    """A checkpoint of which a file is not as it was written.

    Args:
      path: The checkpoint.
      wrong: A line for each file.
    """

    def __init__(self, path: Path, wrong: list[str]):
        self.wrong = wrong
        rule = "every byte has the hash that the MANIFEST lists"
        super().__init__(*(Problem(f"{path}: {each}", rule, "another step") for each in wrong))


def listed(path: Path) -> Manifest:
    """Returns the list of a checkpoint whose files are there, in their sizes.

    Raises:
      Damaged: If they are not, or the list is altered.
      JaxparError: If it has no list: an older jaxpar wrote it.
    """
    if listing.is_older(path):
        raise listing.refuse_older(path)
    # the first process looks at names and sizes: of a shared disk, once is enough
    wrong = manifest.check(path, content=False) if processes.is_first() else []
    _agree(path, wrong)
    try:
        made, wrong = manifest.read(path), []
    except JaxparError as error:
        made, wrong = None, [problem.got for problem in error.problems]
    if made and made.format == manifest.OLDER and processes.is_first():
        wrong = manifest.check(path)  # Orbax checks nothing as it reads
    _agree(path, wrong)
    return made or manifest.read(path)


def arrays(path: Path, made: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays of a checkpoint, each where its sharding says.

    Args:
      path: The checkpoint.
      made: Its list.
      wanted: Path to shape, dtype and sharding of those that are read; another dtype is converted to.

    Raises:
      Damaged: If a byte that any process reads is not as it was written.
    """
    if made.format == manifest.OLDER:
        return orbax.load(path, made.arrays, wanted)
    found, wrong = load(path, made, wanted)
    _agree(path, wrong)
    return found


def _agree(path: Path, wrong: list[str]) -> None:
    if everything := processes.gathered(wrong):
        raise Damaged(path, everything)
