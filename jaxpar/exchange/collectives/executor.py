"""Runs a table of messages: every round is a `ppermute`, inside `shard_map`.

    round ─► groups of messages of one length, in which a device sends and receives at most one ─► a ppermute per group

Every device runs the same program, so a device looks up its offsets in an array, by its index on the axis.
"""

from collections.abc import Iterable, Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.exchange.collectives.algorithms import Message, Round

Permute = list[Message]


def permutes(messages: Round) -> list[Permute]:
    """Groups the messages of a round into few permutes: of one length, with distinct sources and distinct targets."""
    result: list[Permute] = []
    # in a `ppermute` all arrays have one shape, and a device is the source of at most one, and the target of at most
    # one: a message that does not fit into the permutes so far begins another one
    for message in messages:
        for permute in result if message.size else ():
            head = permute[0]
            alike = (message.size, message.add) == (head.size, head.add)
            if alike and all(message.source != m.source and message.target != m.target for m in permute):
                permute.append(message)
                break
        else:
            result += [[message]] if message.size else []
    return result


def run_rounds(rounds: Sequence[Round], x: jax.Array, axis: str) -> jax.Array:
    """Runs all rounds on this device's array and returns it. Called inside `shard_map`, where `axis` is manual.

    Args:
      rounds: Messages between the devices of the axis, by their indices on it.
      x: This device's array. Shape [elements].
      axis: A mesh axis.
    """
    for messages in rounds:
        start = x  # the messages of a round carry these values
        for permute in permutes(messages):
            x = _permute(permute, start, x, axis)
    return x


def _permute(messages: Permute, before: jax.Array, x: jax.Array, axis: str) -> jax.Array:
    count, device, size = jax.lax.axis_size(axis), jax.lax.axis_index(axis), messages[0].size
    begins, offsets, receives = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, bool)
    for message in messages:
        begins[message.source] = message.part[0]
        offsets[message.target] = message.part[0] if message.into is None else message.into
        receives[message.target] = True
    # offsets are data, not code: each device looks up its own, so that all run the same program
    piece = jax.lax.dynamic_slice(before, (jnp.asarray(begins)[device],), (size,))
    received = jax.lax.ppermute(piece, axis, [(message.source, message.target) for message in messages])
    offset = jnp.asarray(offsets)[device]
    previous = jax.lax.dynamic_slice(x, (offset,), (size,))
    # a device that receives no message gets zeros from `ppermute`, and must keep its values
    new = jnp.where(jnp.asarray(receives)[device], previous + received if messages[0].add else received, previous)
    return jax.lax.dynamic_update_slice(x, new, (offset,))


# Applies a table of messages to arrays on the host.


def deliver(rounds: Iterable[Round], data: np.ndarray) -> np.ndarray:
    """Applies a table to arrays on the host; messages of a round carry the values from before the round.

    Args:
      rounds: The messages of each round.
      data: Every device's array. Shape [devices, elements].
    """
    data = data.copy()
    for messages in rounds:
        carried = [data[message.source, slice(*message.part)].copy() for message in messages]
        for message, values in zip(messages, carried, strict=True):
            begin = message.part[0] if message.into is None else message.into
            target = (message.target, slice(begin, begin + len(values)))
            data[target] = data[target] + values if message.add else values
    return data


def check_all_reduce(rounds: Sequence[Round], group: int, name: str) -> None:
    """Refuses a table after which some device lacks the sum over all devices.

    Args:
      rounds: The table.
      group: Number of devices.
      name: Name of the table, for the message.

    Raises:
      JaxparError: If the table is not an all-reduce.
    """
    elements = max((message.part[1] for messages in rounds for message in messages), default=1)
    data = np.arange(group)[:, None] + np.ones((1, elements), np.int64)
    result = deliver(rounds, data)
    if failing := [device for device in range(group) if (result[device] != data.sum(0)).any()]:
        raise refuse(
            f"algorithm {name!r}: device {failing[0]} of {group} ends without the sum of all",
            rule="after an all-reduce every device has the sum",
            fix="a table of `jaxpar.exchange.collectives.algorithms.ALL_REDUCE`",
        )
