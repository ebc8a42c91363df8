"""Collectives by name, for arrays of any shape, that use only `lax.ppermute`.

Call them inside `shard_map` or a `vmap` with an axis name, like the collectives of `jax.lax`, over any manual axis:

    jax.shard_map(lambda x: all_reduce(x, "data", algorithm="tree"), mesh=mesh, in_specs=P("data"), out_specs=P())

Each function flattens its array, runs a table of messages on it, and reshapes the result.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from jaxpar.errors import refuse, suggest
from jaxpar.exchange.collectives import algorithms
from jaxpar.exchange.collectives.algorithms import Part, Round, padded_size
from jaxpar.exchange.collectives.executor import run_rounds

Table = Callable[[Sequence[int], Part], list[Round]]
TABLES: dict[str, Table] = {
    "send": algorithms.send,
    "broadcast": algorithms.broadcast,
    "reduce": algorithms.reduce,
    "gather": algorithms.gather,
    "scatter": algorithms.scatter,
    "all_gather": algorithms.all_gather,
    "reduce_scatter": algorithms.reduce_scatter,
    "all_to_all": algorithms.all_to_all,
    **algorithms.ALL_REDUCE,
}
ROWS = ("scatter", "reduce_scatter", "all_to_all")  # take an array with one entry per device
OWN = ("gather", "all_gather")  # take one device's entry
_WIDE = 12  # maximum elements shown per device


def send(x: jax.Array, axis: str, *, source: int = 0, target: int = -1) -> jax.Array:
    """Returns the source's x on the target; x is unchanged on other devices. A target of -1 is the last device."""
    count = jax.lax.axis_size(axis)
    return _run(algorithms.send([source % count, target % count], (0, x.size)), x, axis)


def broadcast(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns the root's x on every device."""
    return _run(algorithms.broadcast(_device_order(root, axis), (0, x.size)), x, axis)


def reduce(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns the sum of x over devices on the root; x is unchanged on other devices."""
    return _select_on(root, _run(algorithms.reduce(_device_order(root, axis), (0, x.size)), x, axis), x, axis)


def gather(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns all devices' x on the root, zeros on other devices. Shape [devices, ...]."""
    ranks = _device_order(root, axis)
    entries = _run(algorithms.gather(ranks, (0, len(ranks) * x.size)), _as_entry(x, axis, first=root), axis)
    return _select_on(root, jnp.roll(entries, root, axis=0), jnp.zeros_like(entries), axis)


def scatter(x: jax.Array, axis: str, *, root: int = 0) -> jax.Array:
    """Returns the root's x[i] on the i-th device. x: [devices, ...]."""
    entries = _run(algorithms.scatter(_device_order(root, axis), (0, x.size)), jnp.roll(x, -root, axis=0), axis)
    return _entry_of_this_device(entries, axis, first=root)


def all_gather(x: jax.Array, axis: str) -> jax.Array:
    """Returns all devices' x on every device. Shape [devices, ...]."""
    ranks = _device_order(0, axis)
    return _run(algorithms.all_gather(ranks, (0, len(ranks) * x.size)), _as_entry(x, axis), axis)


def reduce_scatter(x: jax.Array, axis: str) -> jax.Array:
    """Returns the sum of x[i] over devices on the i-th device. x: [devices, ...]."""
    return _entry_of_this_device(_run(algorithms.reduce_scatter(_device_order(0, axis), (0, x.size)), x, axis), axis)


def all_to_all(x: jax.Array, axis: str) -> jax.Array:
    """Sends entry i of each device's x to device i. Both x and the result are [devices, ...]."""
    received = _as_entry(_entry_of_this_device(x, axis), axis)  # this device's own entry is not sent
    buffers = _run(algorithms.all_to_all(_device_order(0, axis), (0, x.size)), jnp.stack([x, received]), axis)
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


def _run(rounds: list[Round], x: jax.Array, axis: str) -> jax.Array:
    return run_rounds(rounds, x.reshape(-1), axis).reshape(x.shape)


def _device_order(root: int, axis: str) -> list[int]:
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


@dataclass(frozen=True, kw_only=True)
class Transcript:
    """A run of a collective: its messages, and the arrays before and after.

    Attributes:
      name: One of `PROGRAMS`.
      rounds: The messages of each round.
      before: The devices' arrays at the start. Shape [devices, ...].
      after: Their arrays after the program has run. Shape [devices, ...].
    """

    name: str
    rounds: list[Round]
    before: np.ndarray
    after: np.ndarray

    def __str__(self) -> str:
        devices = len(self.before)
        lines = [f"{self.name} between {devices} devices"]
        load = np.zeros(devices, int)
        for number, messages in enumerate(self.rounds, 1):
            texts = [
                f"{m.source} -> {m.target} [{m.part[0]}:{m.part[1]}]" + " added" * m.add for m in messages if m.size
            ]
            lines.append(f"round {number}  {', '.join(texts)}")
            for message in messages:
                load[message.source] += message.size
        count = sum(1 for messages in self.rounds for message in messages if message.size)
        lines.append(
            f"{count} messages in {len(self.rounds)} rounds; {load.sum()} elements in all, {load.max()} by the device "
            "that sends most"
        )
        for device in range(devices):
            lines.append(f"device {device}  {_numbers(self.before[device])}  ->  {_numbers(self.after[device])}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """Returns the run as JSON values."""
        rounds = [[asdict(message) for message in messages] for messages in self.rounds]
        return {"name": self.name, "rounds": rounds, "before": self.before.tolist(), "after": self.after.tolist()}


def check(name: str) -> None:
    """Refuses an unknown collective.

    Raises:
      JaxparError: If it is unknown.
    """
    if name not in PROGRAMS:
        raise refuse(f"collective {name!r:.60}", rule=f"one of {', '.join(PROGRAMS)}", fix=suggest(name, PROGRAMS))


def show(name: str, devices: list[Any]) -> Transcript:
    """Runs a collective on these devices; the array of device r begins as 10r, 10r + 1, ...

    Args:
      name: One of `PROGRAMS`.
      devices: Real or simulated devices.

    Raises:
      JaxparError: If the collective is unknown.
    """
    check(name)
    count = len(devices)
    elements = padded_size(count, count) if name == "halving" else count
    shape = (1,) if name in OWN else (count, 1) if name in ROWS else (elements,)
    inputs = 10 * np.arange(count).reshape(-1, *(1,) * len(shape)) + np.arange(np.prod(shape)).reshape(shape)
    spec = PartitionSpec("data")
    program = jax.shard_map(
        lambda x: PROGRAMS[name](x[0], "data")[None],
        mesh=Mesh(np.array(devices), ("data",)), in_specs=spec, out_specs=spec, check_vma=False,
    )  # fmt: skip
    outputs = np.asarray(jax.jit(program)(inputs.astype(np.int32)))
    return Transcript(name=name, rounds=TABLES[name](range(count), (0, elements)), before=inputs, after=outputs)


def _numbers(values: np.ndarray) -> str:
    texts = [str(value) for value in values.reshape(-1)]
    return " ".join(texts[:_WIDE]) + " .." * (len(texts) > _WIDE)
