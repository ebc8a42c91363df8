"""Reads arrays of a checkpoint and verifies every byte that it reads; all processes get the same result.

First it checks the MANIFEST, and the names and sizes of files; all processes learn whether a file is missing. Then each
process reads and hashes the blocks that it needs; all processes learn whether a block is altered.
"""

from collections.abc import Mapping
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.checkpoint import manifest, processes
from jaxpar.checkpoint.array_files import load
from jaxpar.checkpoint.manifest import Manifest
from jaxpar.errors import JaxparError, Problem
from jaxpar.optim.eval_params import EvalSource, eval_sources


class DamagedCheckpoint(JaxparError):
    """A checkpoint with a file that is altered, truncated, missing or added.

    Args:
      path: The checkpoint.
      faults: A line for each file.
    """

    def __init__(self, path: Path, wrong: list[str]):
        self.faults = wrong
        fix = f"another checkpoint, of those that `jaxpar checkpoint ls {path.parent}` lists as good"
        rule = "every byte has the hash that the MANIFEST lists"
        super().__init__(*(Problem(f"{path}: {line}", rule, fix) for line in wrong))


def read_manifest(path: Path) -> Manifest:
    """Reads the MANIFEST of a checkpoint, and checks names and sizes of its files.

    Raises:
      DamagedCheckpoint: If a file is missing or has another size, or the MANIFEST is altered.
    """
    # the first process alone checks names and sizes: the disk is shared
    faults = manifest.check(path, content=False) if processes.is_first() else []
    _check_all_processes(path, faults)
    try:
        contents, faults = manifest.read(path), []
    except JaxparError as error:
        contents, faults = None, [problem.got for problem in error.problems]
    _check_all_processes(path, faults)
    return contents or manifest.read(path)


def read_arrays(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Loads arrays of a checkpoint with the given shardings.

    Args:
      path: The checkpoint.
      contents: Its manifest.
      wanted: Path to shape, dtype and sharding of the arrays to load; a saved array is cast to this dtype.

    Raises:
      DamagedCheckpoint: If a byte that any process reads is not as it was written.
    """
    result, faults = load(path, contents, wanted)
    _check_all_processes(path, faults)
    return result


def read_evaluated(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Like `read_arrays`, but returns the parameters to evaluate: see `jaxpar.optim.eval_params`.

    Raises:
      DamagedCheckpoint: If a byte that any process reads is not as it was written.
    """
    eval_copies = {
        f"params/{name}": copy for name, copy in evaluation_copies(contents).items() if f"params/{name}" in wanted
    }
    requests = dict(wanted)
    for name, copy in eval_copies.items():  # all in their saved dtypes, so that the result is rounded once
        sharding = wanted[name].sharding
        replicated = NamedSharding(sharding.mesh, PartitionSpec()) if isinstance(sharding, NamedSharding) else sharding
        for p, target in {
            name: sharding,
            copy.path: sharding,
            **dict.fromkeys(copy.fields.values(), replicated),
        }.items():
            array = contents.arrays[p]
            requests[p] = jax.ShapeDtypeStruct(array.shape, jnp.dtype(array.dtype), sharding=target)
    loaded = read_arrays(path, contents, requests)
    likes = {name: wanted[name] for name in eval_copies}
    # a copy is donated if the result that is computed from it has the same size
    donated_paths = {copy.path for name, copy in eval_copies.items() if loaded[copy.path].dtype == likes[name].dtype}
    donated_arrays = {p: loaded.pop(p) for p in sorted(donated_paths)}
    shared = {p: loaded[p] for copy in eval_copies.values() for p in (copy.path, *copy.fields.values()) if p in loaded}
    compute = jax.jit(
        partial(_compute_evaluated, eval_copies, likes),
        out_shardings={name: like.sharding for name, like in likes.items()},
        donate_argnums=0,
    )
    loaded |= compute(donated_arrays, shared, {name: loaded[name] for name in eval_copies}) if eval_copies else {}
    return {name: loaded[name] for name in wanted}


def _compute_evaluated(
    found: Mapping[str, EvalSource],
    likes: Mapping[str, jax.ShapeDtypeStruct],
    copied: Mapping[str, jax.Array],
    held: Mapping[str, jax.Array],
    trained: Mapping[str, jax.Array],
) -> dict[str, jax.Array]:
    """Computes the parameters to evaluate in one program, because compiling one per parameter takes seconds."""
    sources = {**copied, **held}
    return {name: copy.evaluate(sources, trained[name]).astype(likes[name].dtype) for name, copy in found.items()}


def evaluation_copies(contents: Manifest) -> dict[str, EvalSource]:
    """Maps the path of each parameter that is evaluated differently to the arrays that it is computed from."""
    return eval_sources(name for name in contents.arrays if name.startswith("optimizer/"))


def _check_all_processes(path: Path, wrong: list[str]) -> None:
    if all_wrong := processes.gather_lines(wrong):
        raise DamagedCheckpoint(path, all_wrong)
