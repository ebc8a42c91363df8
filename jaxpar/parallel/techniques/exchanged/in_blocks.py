"""Queries meet keys block by block, in plain JAX: any mask, any dtype, any device."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.attention import end_of
from jaxpar.models.blocks.cutting import cut_heads, cut_keys, joined_heads, joined_keys
from jaxpar.models.blocks.kernel import (
    Ended,
    Keys,
    Queries,
    Sums,
    ended,
    meet,
    meet_back,
    no_grads,
    nothing_met,
    tied,
    wide,
)
from jaxpar.parallel.techniques.exchanged.walks import Walks
from jaxpar.parallel.techniques.exchanged.ways import Ways


@dataclass(frozen=True)
class InBlocks:
    """A device's part, as walks over tables of pairs of blocks; see `Meeting`.

    Attributes:
      ways: The devices.
      walks: The tables.
      groups: Heads of keys in a group of devices.
      segments: Segments of all tokens [b, s], or None.
    """

    ways: Ways
    walks: Walks
    groups: int
    segments: jax.Array | None

    def given(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns both in blocks."""
        return cut_heads(q, self.walks.queries, self.groups), cut_keys(k, v, self.walks.keys)

    def queries(self, q: jax.Array) -> Queries:
        """Returns the group's queries, where they stand."""
        return tied(Queries(q, *self.walks.stand(self.ways.group, self.segments, self.walks.queries)))

    def _keys(self, kv: jax.Array, whose: jax.Array) -> Keys:
        """Returns keys and values, where those of a group stand."""
        return tied(Keys(kv, *self.walks.stand(whose, self.segments, self.walks.keys)))

    def own(self, queries: Queries, kv: jax.Array) -> Sums:
        """Returns sums over own keys."""
        keys = self._keys(kv, self.ways.group)
        return meet(nothing_met(queries.q), queries, keys, self.walks.own(), self.walks.rule)

    def met(self, sums: Sums, queries: Queries, kv: jax.Array, other: jax.Array) -> Sums:
        """Returns sums over more keys."""
        table = self.walks.met(self.ways.group, other)
        return meet(sums, queries, self._keys(kv, other), table, self.walks.rule)

    def ended(self, sums: Sums, dtype: Any) -> tuple[jax.Array, jax.Array]:
        """Returns the output as a piece, and the logsumexp in blocks."""
        out, logsumexp = ended(sums, dtype)
        return joined_heads(out, self.walks.queries), logsumexp

    def end(self, grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> Ended:
        """Returns the three in blocks."""
        grad, out = (cut_heads(x, self.walks.queries, self.groups) for x in (grad, out))
        return end_of(grad, out, logsumexp)

    def own_back(self, queries: Queries, kv: jax.Array, end: Ended) -> tuple[jax.Array, jax.Array]:
        """Returns gradients, of own keys too."""
        zeros = jnp.zeros(queries.q.shape, wide(queries.q))
        walk = (self.walks.own(), self.walks.rule)
        return meet_back((zeros, no_grads(kv)), queries, self._keys(kv, self.ways.group), end, walk)

    def met_back(
        self, of_q: jax.Array, queries: Queries, kv: jax.Array, end: Ended, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Returns gradients with more added, and those of more keys."""
        keys, table = self._keys(kv, other), self.walks.met(self.ways.group, other)
        return meet_back((of_q, no_grads(kv)), queries, keys, end, (table, self.walks.rule))

    def gradients(self, of_q: jax.Array, of_kv: jax.Array, dtype: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns what was in blocks."""
        of_k, of_v = joined_keys(of_kv.astype(dtype), self.walks.keys)
        return joined_heads(of_q, self.walks.queries).astype(dtype), of_k, of_v
