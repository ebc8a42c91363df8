"""Heads for tokens: each device of a group gives the other devices' heads away, and gets all tokens of its own heads.

    [b, s, heads, k]  ──all_to_all──►  [b, s * ulysses, heads / ulysses, k]     (Ulysses, arXiv:2309.14509)

Heads that tensor parallelism splits stay on their device of `tensor`: the dim is viewed as [tensor, ulysses, heads],
and only the middle is exchanged. If there are fewer heads of keys than devices, they are repeated first.
"""

import math

import jax

from jaxpar.parallel.techniques.ring_attention.ring_devices import AXIS, RingDevices


def repeated_kv_heads(groups: int, ways: RingDevices) -> int:
    """Returns the number of heads of keys after repetition: the smallest multiple that the devices divide."""
    return math.lcm(groups, ways.tensor * ways.ulysses) if ways.ulysses > 1 else groups


def to_tokens(x: jax.Array, ways: RingDevices, copies: int = 1) -> jax.Array:
    """Exchanges heads for all tokens of the group: returns [b, s * ulysses, heads * copies / ulysses, k]."""
    u = ways.ulysses
    if u == 1:
        return x
    x = x if copies == 1 else x.repeat(copies, axis=2)
    b, s, heads, k = x.shape
    x = x.reshape(b, s, ways.tensor, u, heads // u // ways.tensor, k)
    return _exchanged(x, 3, 1, u).reshape(b, s * u, heads // u, k)


def to_heads(x: jax.Array, ways: RingDevices, copies: int = 1) -> jax.Array:
    """Inverts `to_tokens`; sums over copies of a head, as its gradient does."""
    u = ways.ulysses
    if u == 1:
        return x
    b, s, heads, k = x.shape
    x = _exchanged(x.reshape(b, s, ways.tensor, 1, heads // ways.tensor, k), 1, 3, u)
    return x.reshape(b, s // u, heads * u // copies, copies, k).sum(3) if copies > 1 else x.reshape(b, s // u, -1, k)


def _exchanged(x: jax.Array, split: int, concat: int, u: int) -> jax.Array:
    devices = jax.lax.axis_size(AXIS)
    groups = None if u == devices else [list(range(i, i + u)) for i in range(0, devices, u)]
    return jax.lax.all_to_all(x, AXIS, split, concat, axis_index_groups=groups, tiled=True)
