"""Heads for tokens: each device of a group gives the other devices' heads away, and gets its own of all their tokens.

    [b, s, heads, k]  ──all_to_all──►  [b, s * ulysses, heads / ulysses, k]     (Ulysses, arXiv:2309.14509)

Heads that tensor parallelism has cut stay with their device of `tensor`: the dim is cut as [tensor, ulysses, heads],
and only the middle is exchanged. Fewer heads of keys than there are devices are repeated first.
"""

import math

import jax

from jaxpar.parallel.techniques.exchanged.ways import AXIS, Ways


def repeated(groups: int, ways: Ways) -> int:
    """Returns the heads of keys that are exchanged: the fewest that the devices divide, each a copy of one there is."""
    return math.lcm(groups, ways.tensor * ways.ulysses) if ways.ulysses > 1 else groups


def to_tokens(x: jax.Array, ways: Ways, copies: int = 1) -> jax.Array:
    """Returns all tokens of the group and its own heads [b, s * ulysses, heads * copies / ulysses, k]."""
    u = ways.ulysses
    if u == 1:
        return x
    x = x if copies == 1 else x.repeat(copies, axis=2)
    b, s, heads, k = x.shape
    x = x.reshape(b, s, ways.tensor, u, heads // u // ways.tensor, k)
    return _exchanged(x, 3, 1, u).reshape(b, s * u, heads // u, k)


def to_heads(x: jax.Array, ways: Ways, copies: int = 1) -> jax.Array:
    """Returns what `to_tokens` makes, back; of copies of a head the sum, which its gradient is."""
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
