"""A checkpoint of replicas that made their steps apart, read as one model.

saved                                         one model
params/w [replica, ...]                  ──►  params/w: their mean (local SGD, gossip)
exchange/anchor/w, exchange/center/w     ──►  params/w: itself (DiLoCo; elastic averaging)
model_state/mean [replica, ...]          ──►  the mean of floating-point numbers, else the first
optimizer/mu/w [replica, ...]            ──►  likewise, where a run goes on with one model
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
    """Returns the replicas of a layout's checkpoints; None where they make their steps together."""
    exchange = layout.parallel.exchange
    if not exchange.apart:
        return None
    count, model = exchange.count(layout.sizes["data"]), exchange.global_model if exchange.differ else ""
    return SavedReplicas(count=count, exchange=exchange.name, model=model)


def described(arrays: Mapping[str, Array], replicas: SavedReplicas | None) -> dict[str, Array]:
    """Returns the arrays of one model: without the dim of replicas, and without those of the exchange.

    Args:
      arrays: Of a checkpoint, or of a job.
      replicas: Of it.
    """
    if replicas is None:
        return dict(arrays)
    return {
        path: _of_one(array) if _has_replicas(path, replicas) else array
        for path, array in arrays.items()
        if not path.startswith("exchange/")
    }


def read(path: Path, made: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays of one model, its parameters as the run evaluates them.

    Args:
      path: The checkpoint.
      made: Its list.
      wanted: Path to shape, dtype and sharding, without a dim of replicas.

    Raises:
      Damaged: If a byte that any process reads is not as it was written.
      JaxparError: If its replicas are several models.
    """
    return _read(path, made, wanted, reading.evaluated)


def read_to_train(path: Path, made: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct]) -> dict[str, jax.Array]:
    """Returns arrays of one model as they go on to be trained; see `read`."""
    return _read(path, made, wanted, reading.arrays)


def _read(path: Path, made: Manifest, wanted: Mapping[str, jax.ShapeDtypeStruct], get) -> dict[str, jax.Array]:
    replicas = made.replicas
    if replicas is None:
        return get(path, made, wanted)
    if replicas.model == NO_MODEL:
        raise several_models(replicas.exchange)
    plain, several = {}, {}
    for name, like in wanted.items():
        (several if _has_replicas(name, replicas) else plain)[name] = like
    shared = {name: _shared(name, made) for name in several}
    one = {source: several[name] for name, source in shared.items() if source}
    found = get(path, made, plain) if plain else {}
    read = reading.arrays(path, made, one) if one else {}
    found |= {name: read[source] for name, source in shared.items() if source}
    for name in (name for name, source in shared.items() if not source):  # one at a time: all replicas of it at once
        like, saved = several[name], made.arrays[name]
        each = jax.ShapeDtypeStruct(
            (replicas.count, *like.shape), _dtype(saved, like), sharding=_beside_replicas(like.sharding)
        )
        merge = _merging(like.sharding)
        found[name] = merge(get(path, made, {name: each})[name]).astype(like.dtype)
    return {name: found[name] for name in wanted}


@cache
def _merging(on: jax.sharding.Sharding):
    return jax.jit(merge_replicas, out_shardings=on)


def _dtype(saved: Array, like: jax.ShapeDtypeStruct):
    """Returns the dtype to read: what was saved, so that the mean is rounded once."""
    return jnp.dtype(saved.dtype) if jnp.issubdtype(like.dtype, jnp.floating) else like.dtype


def _shared(name: str, made: Manifest) -> str:
    """Returns the path of an array of the exchange that has a parameter of the global model; "" for none."""
    part, _, rest = name.partition("/")
    if part != "params" or made.replicas is None or made.replicas.model == MEAN:
        return ""
    source = f"exchange/{made.replicas.model}/{rest}"
    return source if source in made.arrays else ""  # one that is frozen is equal on all replicas


def _has_replicas(path: str, replicas: SavedReplicas) -> bool:
    part = path.partition("/")[0]
    return part == "model_state" or (part in ("params", "optimizer") and bool(replicas.model))


def _of_one(array: Array) -> Array:
    return dataclasses.replace(array, shape=array.shape[1:], bytes=array.bytes // array.shape[0])


def _beside_replicas(on: jax.sharding.Sharding | None) -> jax.sharding.Sharding | None:
    if not isinstance(on, NamedSharding):
        return on
    return NamedSharding(on.mesh, PartitionSpec(None, *on.spec), memory_kind=on.memory_kind)
