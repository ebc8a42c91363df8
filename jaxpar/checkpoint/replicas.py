"""Restores differing replicas under another number of replicas: from their mean, or all from the first.

    saved [4, ...] over data=4 ─► mean, or the first ─► [2, ...] over data=2, all equal until their next step

Shared arrays, such as DiLoCo's anchor, are unchanged; error-feedback residuals of replicas are averaged too, so that
nothing is lost. Step counts are equal, and random keys are made different again.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.checkpoint import one_model, paths, reading
from jaxpar.checkpoint.differences import differences, problems
from jaxpar.checkpoint.manifest import Array, Manifest, SavedReplicas
from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.base import NO_MODEL
from jaxpar.exchange.global_model import several_models

Wanted = Mapping[str, jax.ShapeDtypeStruct]
AXIS = "data"
TOLD = {"mean": "all with the mean of them", "broadcast": "all with the first"}


def read(path: Path, contents: Manifest, like: Any, *, how: str, run: str) -> tuple[dict[str, jax.Array], str]:
    """Loads the arrays of a checkpoint by path with the job's shardings; also returns a note if its replicas changed.

    Args:
      path: The checkpoint.
      contents: Its manifest.
      like: The state of the job.
      how: same, mean or broadcast, if the job has another number of replicas.
      run: The name of the checkpoint on the command line.

    Raises:
      Damaged: If a byte is not as it was written.
      JaxparError: If it does not fit: every difference by path, before anything is read.
    """
    wanted = paths.flatten(like)
    if contents.replicas and contents.replicas.model and not _have_replicas(wanted):
        check_one_model(contents, contents.replicas, paths.describe(like), how=how, run=run)
        return one_model.read_to_train(path, contents, wanted), f"{contents.replicas} goes on as one model"
    replaced = describe_changed(contents.arrays, wanted, how)
    mismatches = [item for item in differences(contents.arrays, paths.describe(like)) if item.path not in replaced]
    if faults := problems(mismatches, run):
        raise JaxparError(*faults)
    arrays = reading.read_arrays(path, contents, {**wanted, **replaced})
    note = f"{next(iter(replaced.values())).shape[0]} replicas go on as another number, {TOLD[how]}" if replaced else ""
    return arrays | convert({name: arrays[name] for name in replaced}, wanted, how), note


def check_one_model(
    contents: Manifest, replicas: SavedReplicas, listed: Mapping[str, Array], *, how: str, run: str
) -> None:
    """Checks that a job of one model can go on from replicas that differ.

    Args:
      contents: The manifest of the checkpoint.
      replicas: Its replicas.
      listed: The arrays of the job.
      how: same, mean or broadcast.
      run: The name of the checkpoint on the command line.

    Raises:
      JaxparError: If `how` is same, the replicas have no common model, or an array does not fit.
    """
    if replicas.model == NO_MODEL:
        raise several_models(replicas.exchange)
    if how == "same":
        raise refuse(
            f"the checkpoint is of {replicas.count} replicas (exchange {replicas.exchange!r}), the job has one model",
            rule="a run goes on with another number of replicas only as it is told to",
            fix=f'checkpoint.replicas = "mean", which takes {replicas}; or the exchange and data={replicas.count}',
        )
    if faults := problems(differences(one_model.describe(contents.arrays, replicas), listed), run):
        raise JaxparError(*faults)


def describe_changed(saved: Mapping[str, Array], wanted: Wanted, how: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Describes the arrays that were saved for another number of replicas, to be read replicated over `data`.

    Args:
      saved: Arrays of the checkpoint.
      wanted: Arrays of the job.
      how: same, mean or broadcast.

    Raises:
      JaxparError: If there are some, and `how` is same.
    """
    differ = _have_replicas(wanted)
    result = {
        path: jax.ShapeDtypeStruct((saved[path].shape[0], *want.shape[1:]), want.dtype, sharding=_whole(want.sharding))
        for path, want in wanted.items()
        if (differ or path.startswith("exchange/")) and path in saved and _other_number(saved[path].shape, want)
    }
    if result and how == "same":
        path = next(iter(result))
        count, count_now = saved[path].shape[0], wanted[path].shape[0]
        raise refuse(
            f"the checkpoint is of {count} replicas, the job has {count_now}",
            rule="a run goes on with another number of replicas only as it is told to",
            fix=f'checkpoint.replicas = "mean" (take their mean), or "broadcast" (take the first); or data={count}',
        )
    return result


def convert(arrays: Mapping[str, jax.Array], wanted: Wanted, how: str) -> dict[str, jax.Array]:
    """Converts arrays [replica, ...] to the job's number of replicas.

    Args:
      arrays: The saved arrays.
      wanted: Shape, dtype and sharding in the job, by path.
      how: mean, or broadcast of the first.
    """
    return {path: _convert(x, wanted[path], how) for path, x in arrays.items()}


def _convert(x: jax.Array, want: jax.ShapeDtypeStruct, how: str) -> jax.Array:
    count = want.shape[0]

    def one(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            fold = lambda key, replica: jax.random.fold_in(key, replica)  # noqa: E731
            fold_all = jax.vmap(lambda replica: jax.vmap(lambda key: fold(key, replica))(x[0].reshape(-1)))
            return fold_all(jnp.arange(count)).reshape(want.shape)
        mean = how == "mean" and jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.broadcast_to(jnp.mean(x, axis=0).astype(x.dtype) if mean else x[0], want.shape)

    return jax.jit(one, out_shardings=want.sharding)(x)


def _have_replicas(wanted: Wanted) -> bool:
    return all(_is_per_replica(want) for path, want in wanted.items() if path.startswith("params/"))


def _is_per_replica(want: jax.ShapeDtypeStruct) -> bool:
    """Whether each replica has its own entry of an array: its first dim is sharded over `data`."""
    return isinstance(want.sharding, NamedSharding) and tuple(want.sharding.spec)[:1] == (AXIS,)


def _other_number(shape: tuple[int, ...], want: jax.ShapeDtypeStruct) -> bool:
    same = len(shape) == len(want.shape) and shape[1:] == want.shape[1:]
    return _is_per_replica(want) and same and shape[0] != want.shape[0]


def _whole(sharding: Any) -> NamedSharding:
    spec = tuple(sharding.spec)[1:]
    return NamedSharding(sharding.mesh, PartitionSpec(None, *spec), memory_kind=sharding.memory_kind)
