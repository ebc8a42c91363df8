"""Reads a checkpoint of replicas with separate steps as one model, or for another number of replicas.

saved                                         one model
params/w [replica, ...]                  ──►  params/w: their mean (local SGD, gossip)
exchange/anchor/w, exchange/center/w     ──►  params/w: itself (DiLoCo; elastic averaging)
model_state/mean [replica, ...]          ──►  the mean of floating-point numbers, else the first
optimizer/mu/w [replica, ...]            ──►  likewise, if training resumes with one model
"""

import dataclasses
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.checkpoint import array_files, reading
from jaxpar.checkpoint.differences import differences, problems
from jaxpar.checkpoint.manifest import Manifest, SavedArray, SavedReplicas
from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.base import MEAN, NO_MODEL
from jaxpar.exchange.global_model import merge_replicas, several_models
from jaxpar.parallel.layout import Layout


def describe_replicas(layout: Layout) -> SavedReplicas | None:
    """Returns the replicas in a layout's checkpoints; None if all replicas make the same step."""
    exchange = layout.parallel.exchange
    if not exchange.per_replica:
        return None
    count, model = exchange.count(layout.sizes["data"]), exchange.global_model if exchange.replicas_differ else ""
    return SavedReplicas(count=count, exchange=exchange.name, model=model)


def describe_as_one(arrays: Mapping[str, SavedArray], replicas: SavedReplicas | None) -> dict[str, SavedArray]:
    """Describes the arrays of one model: without the replica dim, and without the arrays of the exchange.

    Args:
      arrays: The arrays of a checkpoint or of a job.
      replicas: Its replicas.
    """
    if replicas is None:
        return dict(arrays)
    return {
        path: _drop_replica_dim(array) if _has_replicas(path, replicas) else array
        for path, array in arrays.items()
        if not path.startswith("exchange/")
    }


def read_as_one(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Loads the arrays of the global model, with the parameters to evaluate.

    Args:
      path: The checkpoint.
      contents: Its manifest.
      wanted: Path to shape, dtype and sharding, without a replica dim.

    Raises:
      DamagedCheckpoint: If a byte that any process reads is not as it was written.
      JaxparError: If each of its replicas is a model of its own.
    """
    return _read_each_replica(path, contents, wanted, reading.read_evaluated)


def read_to_train(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Loads the arrays of the global model, with the trained parameters."""
    return _read_each_replica(path, contents, wanted, reading.read_arrays)


def _read_each_replica(
    path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct], get
) -> dict[str, jax.Array]:
    replicas = contents.replicas
    if replicas is None:
        return get(path, contents, wanted)
    if replicas.model == NO_MODEL:
        raise several_models(replicas.exchange)
    shared_likes, replica_likes = {}, {}
    for name, like in wanted.items():
        (replica_likes if _has_replicas(name, replicas) else shared_likes)[name] = like
    exchange_paths = {name: _exchange_path(name, contents) for name in replica_likes}
    exchange_likes = {source: replica_likes[name] for name, source in exchange_paths.items() if source}
    result = get(path, contents, shared_likes) if shared_likes else {}
    exchange_arrays = reading.read_arrays(path, contents, exchange_likes) if exchange_likes else {}
    result |= {name: exchange_arrays[source] for name, source in exchange_paths.items() if source}
    # one array at a time, as all of its replicas are read together
    for name in (name for name, source in exchange_paths.items() if not source):
        like, saved_array = replica_likes[name], contents.arrays[name]
        stacked = jax.ShapeDtypeStruct(
            (replicas.count, *like.shape), _dtype(saved_array, like), sharding=_add_replica_dim(like.sharding)
        )
        merge = _merge(like.sharding)
        result[name] = merge(get(path, contents, {name: stacked})[name]).astype(like.dtype)
    return {name: result[name] for name in wanted}


@cache
def _merge(on: jax.sharding.Sharding):
    return jax.jit(merge_replicas, out_shardings=on)


def _dtype(saved: SavedArray, like: jax.ShapeDtypeStruct):
    """Returns the dtype to read: for floats the saved one, so that the mean is rounded only once."""
    return jnp.dtype(saved.dtype) if jnp.issubdtype(like.dtype, jnp.inexact) else like.dtype


def _exchange_path(name: str, contents: Manifest) -> str:
    """Path of the exchange's array that holds a parameter of the global model; "" if there is none."""
    part, _, suffix = name.partition("/")
    if part != "params" or contents.replicas is None or contents.replicas.model == MEAN:
        return ""
    source = f"exchange/{contents.replicas.model}/{suffix}"
    return source if source in contents.arrays else ""  # a frozen parameter is equal on all replicas


def _has_replicas(path: str, replicas: SavedReplicas) -> bool:
    part = path.partition("/")[0]
    return part == "model_state" or (part in ("params", "optimizer") and bool(replicas.model))


def _drop_replica_dim(array: SavedArray) -> SavedArray:
    return dataclasses.replace(array, shape=array.shape[1:], bytes=array.bytes // array.shape[0])


def _add_replica_dim(on: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    if not isinstance(on, NamedSharding):
        return on
    return NamedSharding(on.mesh, PartitionSpec(None, *on.spec), memory_kind=on.memory_kind)


# Restores differing replicas under another number of replicas: from their mean, or all from the first.
#
#     saved [4, ...] over data=4 ─► mean, or the first ─► [2, ...] over data=2, all equal until their next step
#
# Shared arrays, such as DiLoCo's anchor, are unchanged; error-feedback residuals of replicas are averaged too, so that
# nothing is lost. Step counts are equal, and random keys are made different again.

Wanted = Mapping[str, jax.ShapeDtypeStruct]
AXIS = "data"
TOLD = {"mean": "all with the mean of them", "broadcast": "all with the first"}


def read(path: Path, contents: Manifest, like: object, *, how: str, run: str) -> tuple[dict[str, jax.Array], str]:
    """Loads the arrays of a checkpoint by path with the job's shardings; also returns a note if its replicas changed.

    Args:
      path: The checkpoint.
      contents: Its manifest.
      like: The state of the job.
      how: same, mean or broadcast, if the job has another number of replicas.
      run: The name of the checkpoint on the command line.

    Raises:
      DamagedCheckpoint: If a byte is not as it was written.
      JaxparError: If it does not fit, before any array is read; the message has every difference by path.
    """
    wanted = array_files.flatten(like)
    if contents.replicas and contents.replicas.model and not _have_replicas(wanted):
        check_one_model(contents, contents.replicas, array_files.describe(like), how=how, run=run)
        return read_to_train(path, contents, wanted), f"{contents.replicas} goes on as one model"
    replaced = describe_changed(contents.arrays, wanted, how)
    mismatches = [
        item for item in differences(contents.arrays, array_files.describe(like)) if item.path not in replaced
    ]
    if faults := problems(mismatches, run):
        raise JaxparError(*faults)
    arrays = reading.read_arrays(path, contents, {**wanted, **replaced})
    note = f"{next(iter(replaced.values())).shape[0]} replicas go on as another number, {TOLD[how]}" if replaced else ""
    return arrays | convert({name: arrays[name] for name in replaced}, wanted, how), note


def check_one_model(
    contents: Manifest, replicas: SavedReplicas, listed: Mapping[str, SavedArray], *, how: str, run: str
) -> None:
    """Checks that a job with one model can resume from replicas that differ.

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
    if faults := problems(differences(describe_as_one(contents.arrays, replicas), listed), run):
        raise JaxparError(*faults)


def describe_changed(saved: Mapping[str, SavedArray], wanted: Wanted, how: str) -> dict[str, jax.ShapeDtypeStruct]:
    """Returns the arrays that were saved for another number of replicas, described as replicated over `data`.

    Args:
      saved: Arrays of the checkpoint.
      wanted: Arrays of the job.
      how: same, mean or broadcast.

    Raises:
      JaxparError: If there are such arrays, and `how` is same.
    """
    differ = _have_replicas(wanted)
    result = {
        path: jax.ShapeDtypeStruct(
            (saved[path].shape[0], *want.shape[1:]), want.dtype, sharding=_replicated_over_data(want.sharding)
        )
        for path, want in wanted.items()
        if (differ or path.startswith("exchange/")) and path in saved and _has_other_count(saved[path].shape, want)
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

    def convert_array(x: jax.Array) -> jax.Array:
        if jnp.issubdtype(x.dtype, jax.dtypes.prng_key):
            fold = lambda key, replica: jax.random.fold_in(key, replica)  # noqa: E731
            fold_all = jax.vmap(lambda replica: jax.vmap(lambda key: fold(key, replica))(x[0].reshape(-1)))
            return fold_all(jnp.arange(count)).reshape(want.shape)
        mean = how == "mean" and jnp.issubdtype(x.dtype, jnp.inexact)
        return jnp.broadcast_to(jnp.mean(x, axis=0).astype(x.dtype) if mean else x[0], want.shape)

    return jax.jit(convert_array, out_shardings=want.sharding)(x)


def _have_replicas(wanted: Wanted) -> bool:
    return all(_is_per_replica(want) for path, want in wanted.items() if path.startswith("params/"))


def _is_per_replica(want: jax.ShapeDtypeStruct) -> bool:
    """Whether each replica has its own entry of an array: its first dim is sharded over `data`."""
    return isinstance(want.sharding, NamedSharding) and tuple(want.sharding.spec)[:1] == (AXIS,)


def _has_other_count(shape: tuple[int, ...], want: jax.ShapeDtypeStruct) -> bool:
    same = len(shape) == len(want.shape) and shape[1:] == want.shape[1:]
    return _is_per_replica(want) and same and shape[0] != want.shape[0]


def _replicated_over_data(sharding: NamedSharding) -> NamedSharding:
    spec = tuple(sharding.spec)[1:]
    return NamedSharding(sharding.mesh, PartitionSpec(None, *spec), memory_kind=sharding.memory_kind)
