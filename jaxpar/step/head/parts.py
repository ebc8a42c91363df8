"""Rows of logits whose vocabulary is cut in equal parts: what devices send each other of them, for a loss."""

import math

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, PartitionSpec

from jaxpar.models.named import axes_of, constrain_to, spec_of


def parts(vocab: int) -> int:
    """Returns in how many parts the step that is traced cuts a vocabulary; 1 where they are not equal, or not XLA's."""
    (entry,) = spec_of(("vocab",)) or (None,)
    axes = axes_of(entry)
    mesh = jax.sharding.get_abstract_mesh()
    kinds = dict(zip(mesh.axis_names, mesh.axis_types, strict=True))
    if any(kinds[axis] != AxisType.Auto for axis in axes):
        return 1
    ways = math.prod(mesh.shape[axis] for axis in axes)
    return 1 if vocab % ways else ways


def of_parts(wide: jax.Array, labels: jax.Array, ways: int) -> tuple[jax.Array, jax.Array]:
    """Returns the logarithm of the sum of exponentials, and the label's logit, of rows that are cut in equal parts."""
    shape = (*wide.shape[:-1], ways, wide.shape[-1] // ways)
    cut = wide.reshape(shape)
    first = jax.lax.broadcasted_iota(jnp.int32, shape[:-1], wide.ndim - 1) * shape[-1]
    number = labels[..., None].astype(jnp.int32) - first
    own = jax.nn.logsumexp(cut, axis=-1), _at(cut, number)
    free = (PartitionSpec.UNCONSTRAINED,) * (wide.ndim - 1)
    said = constrain_to(jnp.stack(own, axis=-1), PartitionSpec(*free, None, None))
    return jax.nn.logsumexp(said[..., 0], axis=-1), jnp.sum(said[..., 1], axis=-1)


def _at(cut: jax.Array, number: jax.Array) -> jax.Array:
    """Returns the entry of a number in each part of a row, and 0 where the part has none of it."""
    if AxisType.Manual in jax.sharding.get_abstract_mesh().axis_types:
        # inside of a pipeline a lookup is another device's matter: see `jaxpar.pipeline.jaxprs.lookups`
        each = jax.lax.broadcasted_iota(number.dtype, cut.shape, cut.ndim - 1)
        return jnp.sum(jnp.where(each == number[..., None], cut, 0.0), axis=-1)
    # looked up, not summed out: for processors XLA would write down all that is summed
    found = jnp.take_along_axis(cut, number[..., None], axis=-1, mode="clip")[..., 0]
    return jnp.where((number >= 0) & (number < cut.shape[-1]), found, 0.0)


def at(labels: jax.Array, logits: jax.Array) -> jax.Array:
    """Returns which entry of each row of logits is the label."""
    return jax.lax.broadcasted_iota(labels.dtype, logits.shape, logits.ndim - 1) == labels[..., None]
