"""Gathers a parameter when the model reads it, or moves its shards to another dim."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.sharding.names import shard_counts

constrained = jax.lax.with_sharding_constraint


def reshard_padded(value: jax.Array, used: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Reshards an array to the spec that the model reads, padded inside of the program if its shards are not equal.

    XLA would pad such shards itself, but if `fsdp` also splits the array, every device would first gather the whole
    array. If the array is padded first, XLA uses an all-to-all, and the slice that removes the padding sends nothing.

    Args:
      value: The stored array.
      used: Sharding in which the model reads it.
      whole: The stored sharding without `fsdp`.
    """
    pad_widths = padding(value.shape, used)
    if not any(pad_widths):
        return constrained(value, used)
    padded = constrained(jnp.pad(constrained(value, whole), [(0, n) for n in pad_widths]), whole)
    return constrained(jax.lax.slice(constrained(padded, used), (0,) * value.ndim, value.shape), used)


def padding(shape: tuple[int, ...], used: NamedSharding) -> tuple[int, ...]:
    """Returns the number of entries to add to each dim, so that its shards are equal."""
    ways = shard_counts(used.spec, len(shape), used.mesh.shape)
    return tuple(-size % n for size, n in zip(shape, ways, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Gathers a stored parameter for use; the gradient is constrained to the stored sharding directly.

    This matters for HSDP and with `context`. By default JAX constrains the gradient to `used` first, so XLA all-reduces
    it over all axes together, instead of a reduce-scatter over `fsdp` and an all-reduce of the shard over the other
    axes. With `fsdp` alone XLA uses a reduce-scatter in both cases. The gradient of a table that is looked up by rows
    is not constrained, because XLA would replicate the activations for it (`models/blocks/lookup.py` looks up by
    columns).

    A matrix is first constrained to its stored sharding. Otherwise XLA gathers a slice of a stack with a dim of length
    one, for which it copies the whole stack to another dim order and holds the copy. Small vectors may already be
    gathered.
    """
    return _gather_value(value, used, stored)


def _gather_value(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    return constrained(constrained(value, stored) if value.ndim > 1 else value, used)


def _gather_forward(value, used, stored):
    return _gather_value(value, used, stored), None


def _gather_backward(used, stored, _, gradient):
    return (constrained(gradient, stored),)


gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_combined(value: jax.Array, used: NamedSharding, stored: NamedSharding, axis: str) -> jax.Array:
    """Gathers an array that `axis` does not split so that XLA combines it with gathers of arrays that `axis` splits.

    XLA combines only gathers with the same device groups, and orders the groups by the axes that split the array. This
    order differs between a matrix over `fsdp` and `tensor` and a vector over `fsdp`. So this function makes a copy for
    each device along the axis, as a shard of an additional dim that the axis splits.
    """
    copies = jnp.broadcast_to(value[..., None], (*value.shape, used.mesh.shape[axis]))
    for sharding in (stored, used):
        dims = (*sharding.spec, *(None,) * (value.ndim - len(sharding.spec)))
        copies = constrained(copies, NamedSharding(sharding.mesh, PartitionSpec(*dims, axis)))
    local_copy = jax.shard_map(
        lambda copy: copy[..., 0],
        in_specs=PartitionSpec(*(None,) * value.ndim, axis),
        out_specs=PartitionSpec(),
        axis_names={axis},
        check_vma=False,
    )(copies)
    return constrained(local_copy, used)


def _gather_combined_forward(value, used, stored, axis):
    return gather_combined(value, used, stored, axis), None


def _gather_combined_backward(used, stored, axis, _, gradient):
    return (constrained(gradient, stored),)


gather_combined.defvjp(_gather_combined_forward, _gather_combined_backward)
