"""Collectives where the model reads a parameter: a gather, or a move to another dim than the stored one."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.sharding.names import shard_counts

constrained = jax.lax.with_sharding_constraint


def reshard_padded(value: jax.Array, used: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Reshards an array to the spec that the model reads, padded inside of the program if its shards are not equal.

    XLA would pad such shards by itself, but if `fsdp` splits the array too, every device would first gather the whole
    array. Padded first, each device sends every other one its shard (an all-to-all), and the slice that removes the
    padding moves nothing.

    Args:
      value: The array, as stored.
      used: Sharding where the model reads it.
      whole: Sharding as stored, but gathered over `fsdp`.
    """
    pad_widths = padding(value.shape, used)
    if not any(pad_widths):
        return constrained(value, used)
    padded = constrained(jnp.pad(constrained(value, whole), [(0, n) for n in pad_widths]), whole)
    return constrained(jax.lax.slice(constrained(padded, used), (0,) * value.ndim, value.shape), used)


def padding(shape: tuple[int, ...], used: NamedSharding) -> tuple[int, ...]:
    """Returns the number of entries that each dim lacks to be split into equal shards."""
    ways = shard_counts(used.spec, len(shape), used.mesh.shape)
    return tuple(-size % n for size, n in zip(shape, ways, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Gathers a stored parameter for use; the gradient is constrained to the stored sharding directly.

    For HSDP, and with `context`. By default JAX constrains the gradient to `used` first. XLA then all-reduces it over
    all axes together, where a reduce-scatter over `fsdp` and an all-reduce of the shard over the rest would do. With
    `fsdp` alone it makes the reduce-scatter either way. The gradient of a table that is looked up by rows is left
    alone: XLA would reshard the activations for it, by replicating them (`models/blocks/lookup.py` has one by columns).

    A matrix is constrained to its stored sharding first. Otherwise, of a slice of a stack, XLA gathers a dim of length
    one too, for which it copies and keeps the whole stack in another dim order. Small vectors may be gathered already.
    """
    return _gathered(value, used, stored)


def _gathered(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    return constrained(constrained(value, stored) if value.ndim > 1 else value, used)


def _gather_forward(value, used, stored):
    return _gathered(value, used, stored), None


def _gather_backward(used, stored, _, gradient):
    return (constrained(gradient, stored),)


gather.defvjp(_gather_forward, _gather_backward)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3))
def gather_combined(value: jax.Array, used: NamedSharding, stored: NamedSharding, axis: str) -> jax.Array:
    """`gather` of an array that `axis` does not split, combined by XLA with gathers of arrays that it splits.

    XLA writes the device groups of a gather in the order of the axes that split the array: those of a matrix over
    `fsdp` and `tensor` in another order than those of a vector over `fsdp`, and it combines only gathers with the same
    groups. So each device along the axis gets a copy of its own, as a shard of an extra dim that the axis splits.
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


def _gather_beside_forward(value, used, stored, axis):
    return gather_combined(value, used, stored, axis), None


def _gather_beside_backward(used, stored, axis, _, gradient):
    return (constrained(gradient, stored),)


gather_combined.defvjp(_gather_beside_forward, _gather_beside_backward)
