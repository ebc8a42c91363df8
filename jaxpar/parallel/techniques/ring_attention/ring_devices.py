"""The devices of the context axis as a ring of groups: devices of a group exchange heads, and groups rotate keys.

    context = 8, ulysses = 2      group 0    group 1    group 2    group 3
                                  0 1        2 3        4 5        6 7
    all_to_all of heads           within a group
    hops of keys and values       0 -> 2 -> 4 -> 6 -> 0 and 1 -> 3 -> 5 -> 7 -> 1

Neighbours exchange heads, because the all_to_all of all tokens needs the fastest links (arXiv:2405.07719).
"""

import math
from dataclasses import dataclass

import jax

AXIS = "context"


@dataclass(frozen=True)
class RingDevices:
    """The numbers of devices in a ring, in a group, and of tensor parallelism.

    Attributes:
      ring: Number of groups, between which keys and values rotate.
      ulysses: Number of devices of a group, which exchange heads for tokens.
      tensor: Number of shards of the heads by tensor parallelism.
    """

    ring: int
    ulysses: int
    tensor: int = 1

    @property
    def group(self) -> jax.Array:
        """The group of the calling device, inside of `jax.shard_map`."""
        return jax.lax.axis_index(AXIS) // self.ulysses

    def permute(self, x: jax.Array, to: dict[int, int]) -> jax.Array:
        """Sends each group's array to group `to[group]`; returns the array that this group receives."""
        ulysses = self.ulysses
        pairs = [(source * ulysses + i, target * ulysses + i) for source, target in to.items() for i in range(ulysses)]
        return jax.lax.ppermute(x, AXIS, pairs)

    def send_on(self, x: jax.Array) -> jax.Array:
        """Sends each group's array to the next group; returns that of the previous one."""
        return self.permute(x, {group: (group + 1) % self.ring for group in range(self.ring)})


# Heads for tokens: each device of a group gives the other devices' heads away, and gets all tokens of its own heads.
#
#     [b, s, heads, k]  ──all_to_all──►  [b, s * ulysses, heads / ulysses, k]     (Ulysses, arXiv:2309.14509)
#
# Heads that tensor parallelism splits stay on their device of `tensor`: the dim is viewed as [tensor, ulysses, heads],
# and only the middle is exchanged. If there are fewer heads of keys than devices, they are repeated first.


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
    return _all_to_all(x, 3, 1, u).reshape(b, s * u, heads // u, k)


def to_heads(x: jax.Array, ways: RingDevices, copies: int = 1) -> jax.Array:
    """Inverts `to_tokens`; sums over copies of a head, as the gradient of `to_tokens` does."""
    u = ways.ulysses
    if u == 1:
        return x
    b, s, heads, k = x.shape
    x = _all_to_all(x.reshape(b, s, ways.tensor, 1, heads // ways.tensor, k), 1, 3, u)
    return x.reshape(b, s // u, heads * u // copies, copies, k).sum(3) if copies > 1 else x.reshape(b, s // u, -1, k)


def _all_to_all(x: jax.Array, split: int, concat: int, u: int) -> jax.Array:
    devices = jax.lax.axis_size(AXIS)
    groups = None if u == devices else [list(range(i, i + u)) for i in range(0, devices, u)]
    return jax.lax.all_to_all(x, AXIS, split, concat, axis_index_groups=groups, tiled=True)
