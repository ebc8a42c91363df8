"""One executor of tables of messages: every round is a `ppermute`, inside of `shard_map`.

    round ─► messages of one length, of which a device sends at most one and receives at most one ─► ppermute each

As every device runs the same program, where its part begins is looked up in an array by its number.
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.exchange.collectives.messages import Message, Round

Permute = list[Message]


def permutes(messages: Round) -> list[Permute]:
    """Returns the messages of a round as few permutes: of one length, no source twice and no target twice."""
    found: list[Permute] = []
    # `ppermute` moves arrays of one shape and has a device as source, and as target, at most once: what breaks that
    # rule begins a permute of its own
    for message in messages:
        for each in found if message.size else ():
            first = each[0]
            alike = (message.size, message.add) == (first.size, first.add)
            if alike and all(message.source != m.source and message.target != m.target for m in each):
                each.append(message)
                break
        else:
            found += [[message]] if message.size else []
    return found


def run(rounds: Sequence[Round], x: jax.Array, axis: str) -> jax.Array:
    """Returns this device's array after all rounds. Called inside of `shard_map`, where `axis` is manual.

    Args:
      rounds: Messages between the devices of the axis, by their numbers along it.
      x: This device's array. Shape [elements].
      axis: A mesh axis.
    """
    for messages in rounds:
        before = x  # what all messages of a round carry
        for each in permutes(messages):
            x = _permute(each, before, x, axis)
    return x


def _permute(messages: Permute, before: jax.Array, x: jax.Array, axis: str) -> jax.Array:
    count, device, size = jax.lax.axis_size(axis), jax.lax.axis_index(axis), messages[0].size
    begins, into, receives = np.zeros(count, np.int32), np.zeros(count, np.int32), np.zeros(count, bool)
    for message in messages:
        begins[message.source] = message.part[0]
        into[message.target] = message.part[0] if message.into is None else message.into
        receives[message.target] = True
    # offsets are data, not code: a device looks its own up, so that one program serves all of them
    piece = jax.lax.dynamic_slice(before, (jnp.asarray(begins)[device],), (size,))
    came = jax.lax.ppermute(piece, axis, [(message.source, message.target) for message in messages])
    at = jnp.asarray(into)[device]
    there = jax.lax.dynamic_slice(x, (at,), (size,))
    # a device to which nothing is sent gets zeros from `ppermute`, and must keep what it has
    new = jnp.where(jnp.asarray(receives)[device], there + came if messages[0].add else came, there)
    return jax.lax.dynamic_update_slice(x, new, (at,))
