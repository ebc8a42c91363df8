"""The door of a causal ring: pieces come contiguous and leave as an early and a late chunk, one of each per group.

    4 groups, 8 chunks      comes      in the ring
    group 0                 0 1        0 7
    group 1                 2 3        1 6
    group 2                 4 5        2 5
    group 3                 6 7        3 4

Two permutes move an array: all even chunks go to different groups, and so do all odd ones. The bytes of a door are
those of an array, less the chunks that stay. (Zhu, ring-flash-attention; Llama 3, arXiv:2407.21783, section 3.3.2.)
"""

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from jaxpar.parallel.techniques.exchanged.ways import Ways


def chunks_of(group: jax.Array, ring: int) -> tuple[jax.Array, jax.Array]:
    """Returns the two chunks of a group."""
    return group, 2 * ring - 1 - group


def through(x_bs: jax.Array, ways: Ways) -> jax.Array:
    """Returns a group's early and late chunk, of contiguous pieces [b, s, ...]."""
    even, odd = (ways.permute(x, to) for x, to in zip(jnp.split(x_bs, 2, axis=1), _doors(ways.ring), strict=True))
    return jnp.concatenate(_swapped((even, odd), ways), axis=1)


def back(x_bs: jax.Array, ways: Ways) -> jax.Array:
    """Returns contiguous pieces, of a group's early and late chunk [b, s, ...]."""
    doors = [{there: here for here, there in to.items()} for to in _doors(ways.ring)]
    mine = _swapped(jnp.split(x_bs, 2, axis=1), ways)
    return jnp.concatenate([ways.permute(x, to) for x, to in zip(mine, doors, strict=True)], axis=1)


def _doors(ring: int) -> list[dict[int, int]]:
    """Returns where the even chunk of each group goes, and where the odd one."""
    home = {chunk: min(chunk, 2 * ring - 1 - chunk) for chunk in range(2 * ring)}
    return [{here: home[2 * here + odd] for here in range(ring)} for odd in (0, 1)]


def _swapped(two: Sequence[jax.Array], ways: Ways) -> tuple[jax.Array, jax.Array]:
    """Returns two chunks in their order, or in the other one where the group's early chunk is odd."""
    (one, other), even = two, ways.group % 2 == 0
    return jnp.where(even, one, other), jnp.where(even, other, one)
