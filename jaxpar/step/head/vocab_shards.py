"""Cross entropy of logits whose vocabulary is split into equal shards: devices exchange two numbers per row."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxpar.models.dim_names import axes_of, constrain_to, spec_of


def num_vocab_shards(vocab: int) -> int:
    """Returns the number of vocab shards in the traced step; 1 if they are unequal, or on manual axes."""
    (entry,) = spec_of(("vocab",)) or (None,)
    axes = axes_of(entry)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds[axis] != AxisType.Auto for axis in axes):
        return 1
    ways = math.prod(mesh.shape[axis] for axis in axes)
    return 1 if vocab % ways else ways


def sharded_logsumexp(wide: jax.Array, labels: jax.Array, ways: int) -> tuple[jax.Array, jax.Array]:
    """Returns the logsumexp and the label's logit of rows of logits in `ways` equal shards."""
    shape = (*wide.shape[:-1], ways, wide.shape[-1] // ways)
    shards = wide.reshape(shape)
    starts = jax.lax.broadcasted_iota(jnp.int32, shape[:-1], wide.ndim - 1) * shape[-1]
    offsets = labels[..., None].astype(jnp.int32) - starts
    local = jax.nn.logsumexp(shards, axis=-1), _at(shards, offsets)
    free = (PartitionSpec.UNCONSTRAINED,) * (wide.ndim - 1)
    gathered = constrain_to(jnp.stack(local, axis=-1), PartitionSpec(*free, None, None))
    return jax.nn.logsumexp(gathered[..., 0], axis=-1), jnp.sum(gathered[..., 1], axis=-1)


def _at(cut: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the label's entry in each shard of a row, and 0 in shards without the label."""
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        # inside a pipeline the entry may be on another device: see `jaxpar.jaxprs.lookups`
        entries = jax.lax.broadcasted_iota(number.dtype, cut.shape, cut.ndim - 1)
        return jnp.sum(jnp.where(entries == number[..., None], cut, 0.0), axis=-1)
    # looked up, not summed out: on CPU XLA would materialize all summands
    values = jnp.take_along_axis(cut, number[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((number >= 0) & (number < cut.shape[-1]), values, 0.0)


def label_mask(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns a one-hot bool mask of the labels. Shape of `logits`."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
