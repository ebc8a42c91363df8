"""Reads arrays of one checkpoint, and checks every byte that it reads; all processes find the same.

First the MANIFEST, names and sizes of the files: all agree that nothing is missing. Then each process reads what it
needs, and hashes it as it does: all agree that nothing is altered.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.checkpoint import listing, manifest, orbax, processes
from jaxpar.checkpoint.arrays.load import load
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.errors import JaxparError, Problem
from jaxpar.optim.eval_params import Copy, copies


class Damaged(JaxparError):
    """A checkpoint of which a file is not as it was written.

    Args:
      path: The checkpoint.
      wrong: A line for each file.
    """

    def __init__(self, path: Path, wrong: list[str]):
        self.wrong = wrong
        fix = f"another checkpoint, of those that `jaxpar checkpoint ls {path.parent}` lists as good"
        rule = "every byte has the hash that the MANIFEST lists"
        super().__init__(*(Problem(f"{path}: {each}", rule, fix) for each in wrong))


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


def evaluated(path: Path, made: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays like `arrays`, but parameters as a run evaluates them: see `jaxpar.optim.eval_params`.

    Raises:
      Damaged: If a byte that any process reads is not as it was written.
    """
    found = {f"params/{name}": copy for name, copy in judged(made).items() if f"params/{name}" in wanted}
    asked = dict(wanted)
    for name, copy in found.items():  # all in their own dtypes: what is made of them is rounded once
        on = wanted[name].sharding
        whole = NamedSharding(on.mesh, PartitionSpec()) if isinstance(on, NamedSharding) else on
        for each, where in {name: on, copy.path: on, **dict.fromkeys(copy.fields.values(), whole)}.items():
            array = made.arrays[each]
            asked[each] = jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=where)
    read = arrays(path, made, asked)
    likes = {name: wanted[name] for name in found}
    # a copy is given up for what is made of it, where that is as large
    given_up = {copy.path for name, copy in found.items() if read[copy.path].dtype == likes[name].dtype}
    copied = {each: read.pop(each) for each in sorted(given_up)}
    held = {each: read[each] for copy in found.values() for each in (copy.path, *copy.fields.values()) if each in read}
    one = jax.jit(
        partial(_made, found, likes),
        out_shardings={name: like.sharding for name, like in likes.items()},
        donate_argnums=0,
    )
    read |= one(copied, held, {name: read[name] for name in found}) if found else {}
    return {name: read[name] for name in wanted}


def _made(
    found: Mapping[str, Copy],
    likes: Mapping[str, jax.ShapeDtypeStruct],
    copied: Mapping[str, jax.Array],
    held: Mapping[str, jax.Array],
    trained: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Returns the parameters that are evaluated, all by one program: to compile one for each takes seconds."""
    both = {**copied, **held}
    return {name: copy.of(both, trained[name]).astype(likes[name].dtype) for name, copy in found.items()}


def judged(made: Manifest) -> dict[str, Copy]:
    """Returns for each parameter that a run evaluates as another what that follows from, by the parameter's path."""
    return copies(name for name in made.arrays if name.startswith("optimizer/"))


def _agree(path: Path, wrong: list[str]) -> None:
    if everything := processes.gathered(wrong):
        raise Damaged(path, everything)
