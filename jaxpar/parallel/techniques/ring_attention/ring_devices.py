"""The devices of the context axis as a ring of groups: devices of a group exchange heads, the groups rotate keys.

    context = 8, ulysses = 2      group 0    group 1    group 2    group 3
                                  0 1        2 3        4 5        6 7
    all_to_all of heads           within a group
    hops of keys and values       0 -> 2 -> 4 -> 6 -> 0 and 1 -> 3 -> 5 -> 7 -> 1

Neighbours exchange heads, as an all_to_all of all tokens is best kept on the fastest links (arXiv:2405.07719).
"""

from dataclasses import dataclass

import jax

AXIS = "context"


@dataclass(frozen=True)
class RingDevices:
    """The numbers of devices in a ring, in a group, and of tensor parallelism.

    Attributes:
      ring: Groups, between which keys and values rotate.
      ulysses: Devices of a group, which exchange heads for tokens.
      tensor: Shards of the heads over tensor parallelism.
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
