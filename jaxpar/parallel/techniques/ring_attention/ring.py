"""The devices of the context axis as a ring of groups: devices of a group exchange heads, and groups rotate keys.

    context = 8, ulysses = 2      group 0    group 1    group 2    group 3
                                  0 1        2 3        4 5        6 7
    all_to_all of heads           within a group
    hops of keys and values       0 -> 2 -> 4 -> 6 -> 0 and 1 -> 3 -> 5 -> 7 -> 1

Neighbours exchange heads, because the all_to_all of all tokens needs the fastest links (arXiv:2405.07719).

Keys and values rotate; each group's queries attend to those that have arrived (Ring Attention, arXiv:2310.01889).

    ring step      0          1                 ...    P - 1
    sent on        K, V       K, V              ...
    attended to    own        of group r - 1    ...    of group r + 1
    backward too              dK, dV arrive and     dK, dV go home
                              are added to

In each ring step a group sends its current keys to the next group before it attends to them, so that communication
overlaps with compute. The last step sends no keys. The gradients of keys and values rotate with them, in float32; a
group adds its terms when the sum so far has arrived. The last permute returns them to their owner in the dtype of keys,
because no term is added after it. Keys and values are one array, and so are their gradients: a ring step has one
permute of each, and XLA cannot postpone the last permute of gradients. The ring steps are one loop, so that the program
for 64 devices is as long as that for 4.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np

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


class BlockAttention(Protocol):
    """Protocol of attention of a device's queries to the current keys; an implementation chooses its arrays."""

    def prepare(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries, and keys and values as one array, from shards [b, s, heads, k]."""
        ...

    def queries(self, q: jax.Array) -> Any:
        """Returns the queries, with the values that are the same in all ring steps."""
        ...

    def attend_local(self, queries: Any, kv: jax.Array) -> Any:
        """Attends to the keys of the own group; returns the running sums."""
        ...

    def attend_remote(self, sums: Any, queries: Any, kv: jax.Array, other: jax.Array) -> Any:
        """Attends to another group's keys, and adds the results to the running sums."""
        ...

    def finish(self, sums: Any, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns the output [b, s, heads, k] and the logsumexp, from sums over all keys."""
        ...

    def backward_state(self, grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> Any:
        """Bundles the arrays for the backward pass: the results of `finish`, and the output's gradient."""
        ...

    def local_gradients(self, queries: Any, kv: jax.Array, end: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients, in float32, of queries and of the keys and values of their own group."""
        ...

    def remote_gradients(
        self, of_q: jax.Array, queries: Any, kv: jax.Array, end: Any, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the terms of another group's keys to the gradients of queries; also returns these keys' gradients."""
        ...

    def gradients(self, of_q: jax.Array, of_kv: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of q, k and v as shards."""
        ...


@dataclass(frozen=True)
class Ring:
    """The loop over the ring steps on one device.

    Attributes:
      ways: The devices of the ring.
      attention: Implementation of block attention.
    """

    ways: RingDevices
    attention: BlockAttention

    def key_group(self, step: int | jax.Array) -> jax.Array:
        """Returns the group whose keys a device has in a ring step."""
        return (self.ways.group - step) % self.ways.ring

    def forward(self, q: jax.Array, kv: jax.Array) -> Any:
        """Returns the sums of the group's queries over all keys."""
        queries, last = self.attention.queries(q), self.ways.ring - 1

        def rotate_and_attend(carry: tuple[Any, jax.Array], step: jax.Array) -> tuple[tuple[Any, jax.Array], None]:
            sums, kv = carry
            next_kv = self.ways.send_on(kv)
            return (self.attention.attend_remote(sums, queries, kv, self.key_group(step)), next_kv), None

        next_kv = self.ways.send_on(kv) if last else kv
        sums = self.attention.attend_local(queries, kv)
        if last > 1:
            (sums, next_kv), _ = jax.lax.scan(rotate_and_attend, (sums, next_kv), jnp.arange(1, last))
        return self.attention.attend_remote(sums, queries, next_kv, self.key_group(last)) if last else sums

    def backward(self, q: jax.Array, kv: jax.Array, end: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of the group's queries, and of its keys and values."""
        queries, last = self.attention.queries(q), self.ways.ring - 1

        def rotate_and_attend(carry: tuple, step: jax.Array) -> tuple[tuple, None]:
            grad_q, kv, grads_kv = carry
            next_kv, arrived = self.ways.send_on(kv), self.ways.send_on(grads_kv)
            grad_q, step_grads = self.attention.remote_gradients(grad_q, queries, kv, end, self.key_group(step))
            return (grad_q, next_kv, arrived + step_grads), None

        next_kv = self.ways.send_on(kv) if last else kv
        grad_q, grads_kv = self.attention.local_gradients(queries, kv, end)
        if not last:
            return grad_q, grads_kv
        if last > 1:
            (grad_q, next_kv, grads_kv), _ = jax.lax.scan(
                rotate_and_attend, (grad_q, next_kv, grads_kv), jnp.arange(1, last)
            )
        arrived = self.ways.send_on(grads_kv)
        grad_q, step_grads = self.attention.remote_gradients(grad_q, queries, next_kv, end, self.key_group(last))
        return grad_q, self.ways.send_on((arrived + step_grads).astype(q.dtype))


# Entry and exit of a causal ring: contiguous shards become an early and a late chunk per group, and back.
#
#     4 groups, 8 chunks      comes      in the ring
#     group 0                 0 1        0 7
#     group 1                 2 3        1 6
#     group 2                 4 5        2 5
#     group 3                 6 7        3 4
#
# Two permutes move an array: all even chunks go to different groups, and so do all odd ones. An entry or exit sends the
# bytes of the array, less the chunks that stay. (Zhu, ring-flash-attention; Llama 3, arXiv:2407.21783, section 3.3.2.)


def zigzag_chunks(group: jax.Array, ring: int) -> tuple[jax.Array, jax.Array]:
    """Returns the indices of the two chunks of a group."""
    return group, 2 * ring - 1 - group


def enter(x_bs: jax.Array, ways: RingDevices) -> jax.Array:
    """Sends chunks between devices: from contiguous shards [b, s, ...] to an early and a late chunk per group."""
    even, odd = (
        ways.permute(x, to) for x, to in zip(jnp.split(x_bs, 2, axis=1), _chunk_targets(ways.ring), strict=True)
    )
    return jnp.concatenate(_swap_odd_chunks((even, odd), ways), axis=1)


def leave(x_bs: jax.Array, ways: RingDevices) -> jax.Array:
    """Sends chunks between devices: from an early and a late chunk per group [b, s, ...] back to contiguous shards."""
    doors = [{target: source for source, target in to.items()} for to in _chunk_targets(ways.ring)]
    chunks = _swap_odd_chunks(jnp.split(x_bs, 2, axis=1), ways)
    return jnp.concatenate([ways.permute(x, to) for x, to in zip(chunks, doors, strict=True)], axis=1)


def _chunk_targets(ring: int) -> list[dict[int, int]]:
    """Returns the groups to which even chunks and odd chunks are sent."""
    home = {chunk: min(chunk, 2 * ring - 1 - chunk) for chunk in range(2 * ring)}
    return [{group: home[2 * group + odd] for group in range(ring)} for odd in (0, 1)]


def _swap_odd_chunks(two: Sequence[jax.Array], ways: RingDevices) -> tuple[jax.Array, jax.Array]:
    """Swaps the two chunks of a group if its early chunk is odd."""
    (first, second), even = two, ways.group % 2 == 0
    return jnp.where(even, first, second), jnp.where(even, second, first)
