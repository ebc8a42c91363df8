"""Entry and exit of a causal ring: contiguous shards become an early and a late chunk per group, and back.

    4 groups, 8 chunks      comes      in the ring
    group 0                 0 1        0 7
    group 1                 2 3        1 6
    group 2                 4 5        2 5
    group 3                 6 7        3 4

Two permutes move an array: all even chunks go to different groups, and so do all odd ones. An entry or exit sends the
bytes of the array, less the chunks that stay. (Zhu, ring-flash-attention; Llama 3, arXiv:2407.21783, section 3.3.2.)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.parallel.techniques.ring_attention.ring_devices import RingDevices


def chunks_of(group: jax.Array, ring: int) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the two chunks of a group."""
    return group, 2 * ring - 1 - group


def enter(x_bs: jax.Array, ways: RingDevices) -> jax.Array:
    """Permutes contiguous shards [b, s, ...] into a group's early and late chunk."""
    even, odd = (ways.permute(x, to) for x, to in zip(jnp.split(x_bs, 2, axis=1), _doors(ways.ring), strict=True))
    return jnp.concatenate(_swapped((even, odd), ways), axis=1)


def leave(x_bs: jax.Array, ways: RingDevices) -> jax.Array:
    """Permutes a group's early and late chunk [b, s, ...] into contiguous shards."""
    doors = [{target: source for source, target in to.items()} for to in _doors(ways.ring)]
    chunks = _swapped(jnp.split(x_bs, 2, axis=1), ways)
    return jnp.concatenate([ways.permute(x, to) for x, to in zip(chunks, doors, strict=True)], axis=1)


def _doors(ring: int) -> list[dict[int, int]]:
    """Returns the target groups of the even chunks, and of the odd chunks."""
    home = {chunk: min(chunk, 2 * ring - 1 - chunk) for chunk in range(2 * ring)}
    return [{group: home[2 * group + odd] for group in range(ring)} for odd in (0, 1)]


def _swapped(two: Sequence[jax.Array], ways: RingDevices) -> tuple[jax.Array, jax.Array]:
    """Swaps two chunks where the group's early chunk is odd."""
    (first, second), even = two, ways.group % 2 == 0
    return jnp.where(even, first, second), jnp.where(even, second, first)
