"""Queries meet keys in calls of a fused kernel, which takes squares that are causal or full.

    causal, zigzag      own piece           a group before      a group after        (calls)
    keys                early  late         early  late         early  late
    early queries       half                2
    late queries        all    half         1                   1      2

Own pieces are one causal call, though they are two chunks: the early one is earlier than the late one, and causal in a
piece is causal in the row. Of another group two chunks of the four are seen, each of them whole: late queries see early
keys, and either early queries those, or late ones late keys. Which of the two is chosen by where both are read, so that
all devices run the same calls.

What a call returns is in 16 bits, but for its logsumexp. Sums over calls are in float32, and so are gradients.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.fused import Fused, merged
from jaxpar.models.blocks.kernel import no_grads, wide
from jaxpar.models.blocks.rule import Rule
from jaxpar.parallel.techniques.exchanged.ways import Ways


class Final(NamedTuple):
    """What the backward pass knows of queries that have met all keys."""

    out: jax.Array  # [b, s, h, k]
    logsumexp: jax.Array  # [b, h, s]
    grad: jax.Array  # [b, s, h, k]

    def at(self, start: int | jax.Array, size: int) -> "Final":
        """Returns that of one chunk of queries."""
        return Final(_cut(self.out, start, size), _cut(self.logsumexp, start, size, 2), _cut(self.grad, start, size))


@dataclass(frozen=True)
class ByKernel:
    """A device's part, as calls of a kernel; see `Meeting`. Keys and values are [2, b, t, g, k].

    Attributes:
      ways: The devices.
      rule: Which keys a query sees; a window only where one group has all tokens.
      kernel: The kernel.
    """

    ways: Ways
    rule: Rule
    kernel: Fused

    def given(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries as they are, and keys and values as one array."""
        return q, jnp.stack([k, v])

    def queries(self, q: jax.Array) -> jax.Array:
        """Returns queries as they are."""
        return q

    def own(self, queries: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns the output, in float32, and the logsumexp over own keys."""
        out, logsumexp = self.kernel.forward(queries, *kv, causal=self.rule.causal, window=self.rule.window)
        return (out if self.ways.ring == 1 else out.astype(wide(out))), logsumexp

    def met(
        self, sums: tuple[jax.Array, jax.Array], queries: jax.Array, kv: jax.Array, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns both over more keys."""
        if not self.rule.causal:
            return merged(sums, self.kernel.forward(queries, *kv, causal=False))
        for at_q, at_k, (half_q, half_k) in self._squares(queries, kv, other):
            q, (k, v) = _cut(queries, at_q, half_q), _cut(kv, at_k, half_k, 2)
            more = self.kernel.forward(q, k, v, causal=False)
            out, logsumexp = sums
            new = merged((_cut(out, at_q, half_q), _cut(logsumexp, at_q, half_q, 2)), more)
            sums = _put(out, new[0], at_q), _put(logsumexp, new[1], at_q, 2)
        return sums

    def ended(self, sums: tuple[jax.Array, jax.Array], dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns both, the output in the dtype of queries."""
        return sums[0].astype(dtype), sums[1]

    def end(self, grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> Final:
        """Returns the three."""
        return Final(out, logsumexp, grad)

    def own_back(self, queries: jax.Array, kv: jax.Array, end: Final) -> tuple[jax.Array, jax.Array]:
        """Returns gradients, of own keys too."""
        return self._back(queries, kv, end, causal=self.rule.causal, window=self.rule.window)

    def met_back(
        self, of_q: jax.Array, queries: jax.Array, kv: jax.Array, end: Final, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns gradients with more added, and those of more keys."""
        if not self.rule.causal:
            more_q, mine = self._back(queries, kv, end, causal=False)
            return of_q + more_q, mine
        mine = no_grads(kv)
        for at_q, at_k, (half_q, half_k) in self._squares(queries, kv, other):
            q, keys = _cut(queries, at_q, half_q), _cut(kv, at_k, half_k, 2)
            more_q, more_kv = self._back(q, keys, end.at(at_q, half_q), causal=False)
            of_q = _put(of_q, _cut(of_q, at_q, half_q) + more_q, at_q)
            mine = _put(mine, _cut(mine, at_k, half_k, 2) + more_kv, at_k, 2)
        return of_q, mine

    def gradients(self, of_q: jax.Array, of_kv: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the three, in the dtype of queries."""
        of_k, of_v = of_kv.astype(dtype)
        return of_q.astype(dtype), of_k, of_v

    def _back(self, q: jax.Array, kv: jax.Array, end: Final, **mask: Any) -> tuple[jax.Array, jax.Array]:
        of_q, of_k, of_v = self.kernel.backward(q, *kv, end.out, end.logsumexp, end.grad, **mask)
        return of_q.astype(wide(q)), jnp.stack([of_k, of_v]).astype(wide(q))

    def _squares(self, q: jax.Array, kv: jax.Array, other: jax.Array) -> list[tuple]:
        """Returns where the two chunks of queries and keys that meet begin, and how long chunks of both are."""
        halves = half_q, half_k = q.shape[1] // 2, kv.shape[2] // 2
        before = other < self.ways.group
        return [(half_q, 0, halves), (jnp.where(before, 0, half_q), jnp.where(before, 0, half_k), halves)]


def _cut(x: jax.Array, start: int | jax.Array, size: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _put(x: jax.Array, part: jax.Array, start: int | jax.Array, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)
