"""The devices of the context axis as a ring of groups: those of a group exchange heads, the groups rotate keys.

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
class Ways:
    """How many devices do what.

    Attributes:
      ring: Groups, between which keys and values rotate.
      ulysses: Devices of a group, which exchange heads for tokens.
      tensor: Ways in which tensor parallelism cuts the heads before.
    """

    ring: int
    ulysses: int
    tensor: int = 1

    @property
    def group(self) -> jax.Array:
        """The group of the device that asks, inside of `jax.shard_map`."""
        return jax.lax.axis_index(AXIS) // self.ulysses

    def permute(self, x: jax.Array, to: dict[int, int]) -> jax.Array:
        """Returns what the group before sent: each group's array goes to group `to[group]`."""
        u = self.ulysses
        pairs = [(here * u + i, there * u + i) for here, there in to.items() for i in range(u)]
        return jax.lax.ppermute(x, AXIS, pairs)

    def send_on(self, x: jax.Array) -> jax.Array:
        """Returns what the group before sent, all sending theirs to the next."""
        return self.permute(x, {here: (here + 1) % self.ring for here in range(self.ring)})
