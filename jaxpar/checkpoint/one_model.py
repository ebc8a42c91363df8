"""Reads a checkpoint of replicas with separate steps as one model.

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

from jaxpar.checkpoint import reading
from jaxpar.checkpoint.manifest import Array, Manifest, SavedReplicas
from jaxpar.exchange.base import MEAN, NO_MODEL
from jaxpar.exchange.global_model import merge_replicas, several_models
from jaxpar.parallel.layout import Layout


def replicas_of(layout: Layout) -> SavedReplicas | None:
    """The replicas of a layout's checkpoints; None if all make the same step."""
    exchange = layout.parallel.exchange
    if not exchange.per_replica:
        return None
    count, model = exchange.count(layout.sizes["data"]), exchange.global_model if exchange.replicas_differ else ""
    return SavedReplicas(count=count, exchange=exchange.name, model=model)


def describe(arrays: Mapping[str, Array], replicas: SavedReplicas | None) -> dict[str, Array]:
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


def read(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Loads arrays of one model, with parameters in the form that the run evaluates.

    Args:
      path: The checkpoint.
      contents: Its manifest.
      wanted: Path to shape, dtype and sharding, without a replica dim.

    Raises:
      Damaged: If a byte that any process reads is not as it was written.
      JaxparError: If its replicas are several models.
    """
    return _read(path, contents, wanted, reading.read_evaluated)


def read_to_train(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Like `read`, with parameters in the form that the run trains."""
    return _read(path, contents, wanted, reading.read_arrays)


def _read(path: Path, contents: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct], get) -> dict[str, jax.Array]:
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


def _dtype(saved: Array, like: jax.ShapeDtypeStruct):
    """The dtype to read: of floats the saved one, so that the mean is rounded once."""
    return jnp.dtype(saved.dtype) if jnp.issubdtype(like.dtype, jnp.floating) else like.dtype


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


def _drop_replica_dim(array: Array) -> Array:
    return dataclasses.replace(array, shape=array.shape[1:], bytes=array.bytes // array.shape[0])


def _add_replica_dim(on: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    if not isinstance(on, NamedSharding):
        return on
    return NamedSharding(on.mesh, PartitionSpec(None, *on.spec), memory_kind=on.memory_kind)
