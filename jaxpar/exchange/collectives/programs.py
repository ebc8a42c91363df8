"""Collectives by name, for arrays of any shape, that use only `lax.ppermute`.

Call them inside `shard_map` or a `vmap` with an axis name, like the collectives of `jax.lax`, over any manual axis:

    jax.shard_map(lambda x: all_reduce(x, "data", algorithm="tree"), mesh=mesh, in_specs=P("data"), out_specs=P())

Each function flattens its array, runs a table of messages on it, and reshapes the result.
"""

from collections.abc import Callable, Sequence
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.exchange.collectives import algorithms, rooted
from jaxpar.exchange.collectives.executor import run_rounds
from jaxpar.exchange.collectives.rooted import Part, Round, padded_size

Table = Callable[[Sequence[int], Part], list[Round]]
TABLES: dict[str, Table] = {
    "send": rooted.send,
    "broadcast": rooted.broadcast,
    "reduce": rooted.reduce,
    "gather": rooted.gather,
    "scatter": rooted.scatter,
    "all_gather": algorithms.all_gather,
    "reduce_scatter": algorithms.reduce_scatter,
    "all_to_all": algorithms.all_to_all,
    **algorithms.ALL_REDUCE,
}


def send(x: jax.Array, axis: str, *, source: int = 0, target: int = -1) -> jax.Array:
    """Returns the source's x on the target; x is unchanged on other devices. A target of -1 is the last device."""
    count = jax.lax.axis_size(axis)
    return _run(rooted.send([source % count, target % count], (0, x.size)), x, axis)


def broadcast(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns the root's x on every device."""
    return _run(rooted.broadcast(_devices_from(root, axis), (0, x.size)), x, axis)


def reduce(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns the sum of x over devices on the root; x is unchanged on other devices."""
    return _select_on(root, _run(rooted.reduce(_devices_from(root, axis), (0, x.size)), x, axis), x, axis)


def gather(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns all devices' x on the root, zeros on other devices. Shape [devices, ...]."""
    ranks = _devices_from(root, axis)
    entries = _run(rooted.gather(ranks, (0, len(ranks) * x.size)), _as_entry(x, axis, first=root), axis)
    return _select_on(root, jnp.roll(entries, root, axis=0), jnp.zeros_like(entries), axis)


def scatter(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns the root's x[i] on the i-th device. x: [devices, ...]."""
    entries = _run(rooted.scatter(_devices_from(root, axis), (0, x.size)), jnp.roll(x, -root, axis=0), axis)
    return _entry_of_this_device(entries, axis, first=root)


def all_gather(x: jax.Array, axis: str) -> jax.Array:
    """Returns all devices' x on every device. Shape [devices, ...]."""
    ranks = _devices_from(0, axis)
    return _run(algorithms.all_gather(ranks, (0, len(ranks) * x.size)), _as_entry(x, axis), axis)


def reduce_scatter(x: jax.Array, axis: str) -> jax.Array:
    """Returns the sum of x[i] over devices on the i-th device. x: [devices, ...]."""
    return _entry_of_this_device(_run(algorithms.reduce_scatter(_devices_from(0, axis), (0, x.size)), x, axis), axis)


def all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Sends entry i of each device's x to device i. Both x and the result are [devices, ...]."""
    received = _as_entry(_entry_of_this_device(x, axis), axis)  # this device's own entry is not sent
    buffers = _run(algorithms.all_to_all(_devices_from(0, axis), (0, x.size)), jnp.stack([x, received]), axis)
    return buffers[1]


def all_reduce(x: jax.Array, axis: str, *, algorithm: str = "ring") -> jax.Array:
    """Returns the sum of x over devices on every device.

    Args:
      x: An array of any shape.
      axis: A manual axis.
      algorithm: One of `algorithms.ALL_REDUCE`.

    Raises:
      JaxparError: If there is no such algorithm.
    """
    count = jax.lax.axis_size(axis)
    elements = padded_size(x.size, count)
    flat = jnp.pad(x.reshape(-1), (0, elements - x.size))
    return run_rounds(algorithms.all_reduce_rounds(algorithm, count, elements), flat, axis)[: x.size].reshape(x.shape)


PROGRAMS: dict[str, Callable[[jax.Array, str], jax.Array]] = {
    "send": send,
    "broadcast": broadcast,
    "reduce": reduce,
    "gather": gather,
    "scatter": scatter,
    "all_gather": all_gather,
    "reduce_scatter": reduce_scatter,
    "all_to_all": all_to_all,
    **{name: partial(all_reduce, algorithm=name) for name in algorithms.ALL_REDUCE},
}
ROWS = ("scatter", "reduce_scatter", "all_to_all")  # take an array with one entry per device
OWN = ("gather", "all_gather")  # take one device's entry


def _run(rounds: list[Round], x: jax.Array, axis: str) -> jax.Array:
    return run_rounds(rounds, x.reshape(-1), axis).reshape(x.shape)


def _devices_from(root: int, axis: str) -> list[int]:
    """Returns the devices of an axis, with the root first."""
    count = jax.lax.axis_size(axis)
    return [(root + place) % count for place in range(count)]


def _select_on(root: int, there: jax.Array, elsewhere: jax.Array, axis: str) -> jax.Array:
    return jnp.where(jax.lax.axis_index(axis) == root % jax.lax.axis_size(axis), there, elsewhere)


def _device_index(axis: str, first: int) -> jax.Array:
    """Returns this device's index, counted from the device `first`."""
    return (jax.lax.axis_index(axis) - first) % jax.lax.axis_size(axis)


def _as_entry(x: jax.Array, axis: str, *, first: int = 0) -> jax.Array:
    """Returns zeros [devices, ...] with x as this device's entry."""
    is_local = jnp.arange(jax.lax.axis_size(axis)) == _device_index(axis, first)
    return jnp.where(is_local.reshape(-1, *(1,) * x.ndim), x, jnp.zeros_like(x))


def _entry_of_this_device(x: jax.Array, axis: str, *, first: int = 0) -> jax.Array:
    """Returns this device's entry of an array [devices, ...]."""
    return jax.lax.dynamic_index_in_dim(x, _device_index(axis, first), keepdims=False)
