"""A parameter of ZeRO-3, gathered where the model reads it."""

from functools import partial

import jax
from jax.sharding import NamedSharding

constrained = jax.lax.with_sharding_constraint


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def gather(value: jax.Array, used: NamedSharding, stored: NamedSharding) -> jax.Array:
    """Returns a stored parameter where it is used; its gradient goes straight to where it is stored.

    For HSDP, and with `context`. Left to itself JAX constrains the gradient to `used` first. XLA then sums it whole
    over all axes together, where a reduce-scatter over `fsdp` and an all-reduce of the shard over the rest would do.
    With `fsdp` alone it makes the reduce-scatter either way. The gradient of a table that is looked up is left alone:
    XLA would reshard the activations for it, by replicating them.
    """
    return constrained(value, used)


def _gather_forward(value, used, stored):
    return constrained(value, used), None


def _gather_backward(used, stored, _, gradient):
    return (constrained(gradient, stored),)


gather.defvjp(_gather_forward, _gather_backward)
