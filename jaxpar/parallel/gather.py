"""A parameter where the model reads it: gathered, or cut along another dim than it is stored."""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.sharding.shard_bytes import pieces

constrained = jax.lax.with_sharding_constraint


def cut(value: jax.Array, used: NamedSharding, whole: NamedSharding) -> jax.Array:
    """Returns an array as the model reads it, padded inside of the program where its pieces are not equal.

    XLA would pad such pieces by itself, but where `fsdp` cuts the array too it cuts them out of a whole array that
    every device has gathered. Padded first, each device sends every other one its piece (an all-to-all), and the slice
    that takes the padding away moves nothing.

    Args:
      value: As it is stored.
      used: Where the model reads it.
      whole: As it is stored, but gathered over `fsdp`.
    """
    more = padding(value.shape, used)
    if not any(more):
        return constrained(value, used)
    padded = constrained(jnp.pad(constrained(value, whole), [(0, n) for n in more]), whole)
    return constrained(jax.lax.slice(constrained(padded, used), (0,) * value.ndim, value.shape), used)


def padding(shape: tuple[int, ...], used: NamedSharding) -> tuple[int, ...]:
    """Returns how many entries each dim lacks to be cut into equal pieces."""
    ways = pieces(used.spec, len(shape), used.mesh.shape)
    return tuple(-size % n for size, n in zip(shape, ways, strict=True))


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Returns a stored parameter where it is used; its gradient goes straight to where it is stored.

    For HSDP, and with `context`. Left to itself JAX constrains the gradient to `used` first. XLA then sums it whole
    over all axes together, where a reduce-scatter over `fsdp` and an all-reduce of the shard over the rest would do.
    With `fsdp` alone it makes the reduce-scatter either way. The gradient of a table that is looked up by rows is left
    alone: XLA would reshard the activations for it, by replicating them (`models/blocks/lookup.py` has one by columns).

    A matrix is named as stored first. Else of a slice of a stack XLA gathers the slice with its dim of length one, for
    which it copies the whole stack to another order of dims and keeps that. Small vectors may be gathered already.
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
def gather_beside(value: jax.Array, used: NamedSharding, stored: NamedSharding, axis: str) -> jax.Array:
    """Returns what `gather` does, of an array that an axis does not cut, in one collective with arrays that it cuts.

    XLA writes the groups of devices of a gather in the order of what cuts the array: those of a matrix over `fsdp` and
    `tensor` in another one than those of a vector over `fsdp`, and it combines what is written alike. So here each
    device along the axis has a copy of its own, as a piece of a dim that the axis cuts.
    """
    copies = jnp.broadcast_to(value[..., None], (*value.shape, used.mesh.shape[axis]))
    for on in (stored, used):
        dims = (*on.spec, *(None,) * (value.ndim - len(on.spec)))
        copies = constrained(copies, NamedSharding(on.mesh, PartitionSpec(*dims, axis)))
    own = jax.shard_map(
        lambda copy: copy[..., 0],
        in_specs=PartitionSpec(*(None,) * value.ndim, axis),
        out_specs=PartitionSpec(),
        axis_names={axis},
        check_vma=False,
    )(copies)
    return constrained(own, used)


def _gather_beside_forward(value, used, stored, axis):
    return gather_beside(value, used, stored, axis), None


def _gather_beside_backward(used, stored, axis, _, gradient):
    return (constrained(gradient, stored),)


gather_beside.defvjp(_gather_beside_forward, _gather_beside_backward)
