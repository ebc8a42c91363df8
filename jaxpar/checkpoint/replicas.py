"""A run goes on with another number of replicas that differ: with the mean of them, or all with the first.

    saved [4, ...] over data=4 ─► mean, or the first ─► [2, ...] over data=2, all equal until their next step

What they have in common, such as DiLoCo's anchor, stays as it is; errors that replicas remember become their mean too,
so that nothing is lost. Counts are equal, and random keys are made different again.
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


def read(path: Path, made: Manifest, like: Any, *, how: str, run: str) -> tuple[dict[str, jax.Array], str]:
    """Returns the arrays of a checkpoint by path, each where the job wants it; and what became of its replicas, if any.

    Args:
      path: The checkpoint.
      made: Its list.
      like: The state of the job.
      how: same, mean or broadcast, where it has another number of replicas.
      run: The name of the checkpoint on the command line.

    Raises:
      Damaged: If a byte is not as it was written.
      JaxparError: If it does not fit: every difference by path, before anything is read.
    """
    wanted = paths.flat(like)
    if made.replicas and made.replicas.model and not _have_replicas(wanted):
        check_one_model(made, made.replicas, paths.described(like), how=how, run=run)
        return one_model.read_to_train(path, made, wanted), f"{made.replicas} goes on as one model"
    other = changed(made.arrays, wanted, how)
    found = [each for each in differences(made.arrays, paths.described(like)) if each.path not in other]
    if wrong := problems(found, run):
        raise JaxparError(*wrong)
    arrays = reading.arrays(path, made, {**wanted, **other})
    said = f"{next(iter(other.values())).shape[0]} replicas go on as another number, {TOLD[how]}" if other else ""
    return arrays | brought({name: arrays[name] for name in other}, wanted, how), said


def check_one_model(
    made: Manifest, replicas: SavedReplicas, listed: Mapping[str, Array], *, how: str, run: str
) -> None:
    """Checks that a job of one model can go on from replicas that differ.

    Args:
      made: The list of the checkpoint.
      replicas: Of it.
      listed: The arrays of the job.
      how: same, mean or broadcast.
      run: The name of the checkpoint on the command line.

    Raises:
      JaxparError: If it is not said that it may, or an array does not fit.
    """
    if replicas.model == NO_MODEL:
        raise several_models(replicas.exchange)
    if how == "same":
        raise refuse(
            f"the checkpoint is of {replicas.count} replicas (exchange {replicas.exchange!r}), the job has one model",
            rule="a run goes on with another number of replicas only as it is told to",
            fix=f'checkpoint.replicas = "mean", which takes {replicas}; or the exchange and data={replicas.count}',
        )
    if wrong := problems(differences(one_model.described(made.arrays, replicas), listed), run):
        raise JaxparError(*wrong)


def changed(saved: Mapping[str, Array], wanted: Wanted, how: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays that are saved for another number of replicas, as they are to be read: whole over `data`.

    Args:
      saved: Arrays of the checkpoint.
      wanted: Those of the job.
      how: same, mean or broadcast.

    Raises:
      JaxparError: If there are some, and it is not said how they become those of the job.
    """
    differ = _have_replicas(wanted)
    found = {
        path: jax.ShapeDtypeStruct((saved[path].shape[0], *want.shape[1:]), want.dtype, sharding=_whole(want.sharding))
        for path, want in wanted.items()
        if (differ or path.startswith("exchange/")) and path in saved and _other_number(saved[path].shape, want)
    }
    if found and how == "same":
        path = next(iter(found))
        was, now = saved[path].shape[0], wanted[path].shape[0]
        raise refuse(
            f"the checkpoint is of {was} replicas, the job has {now}",
            rule="a run goes on with another number of replicas only as it is told to",
            fix=f'checkpoint.replicas = "mean" (take their mean), or "broadcast" (take the first); or data={was}',
        )
    return found


def brought(arrays: Mapping[str, jax.Array], wanted: Wanted, how: str) -> dict[str, jax.Array]:
    """Returns arrays [replica, ...] for as many replicas as are wanted.

    Args:
      arrays: As they were saved.
      wanted: As they are to be.
      how: mean, or broadcast of the first.
    """
    return {path: _brought(x, wanted[path], how) for path, x in arrays.items()}


def _brought(x: jax.Array, want: jax.ShapeDtypeStruct, how: str) -> jax.Array:
    count = want.shape[0]

    def one(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            fold = lambda key, replica: jax.random.fold_in(key, replica)  # noqa: E731
            each = jax.vmap(lambda replica: jax.vmap(lambda key: fold(key, replica))(x[0].reshape(-1)))
            return each(jnp.arange(count)).reshape(want.shape)
        mean = how == "mean" and jnp.issubdtype(x.dtype, jnp.floating)
        return jnp.broadcast_to(jnp.mean(x, axis=0).astype(x.dtype) if mean else x[0], want.shape)

    return jax.jit(one, out_shardings=want.sharding)(x)


def _have_replicas(wanted: Wanted) -> bool:
    return all(_of_each(want) for path, want in wanted.items() if path.startswith("params/"))


def _of_each(want: jax.ShapeDtypeStruct) -> bool:
    """Returns whether each replica has its own entry of an array."""
    return isinstance(want.sharding, NamedSharding) and tuple(want.sharding.spec)[:1] == (AXIS,)


def _other_number(shape: tuple[int, ...], want: jax.ShapeDtypeStruct) -> bool:
    same = len(shape) == len(want.shape) and shape[1:] == want.shape[1:]
    return _of_each(want) and same and shape[0] != want.shape[0]


def _whole(sharding: Any) -> NamedSharding:
    rest = tuple(sharding.spec)[1:]
    return NamedSharding(sharding.mesh, PartitionSpec(None, *rest), memory_kind=sharding.memory_kind)
