"""Attention of queries to rotating keys block by block, in plain JAX: any mask, any dtype, any device."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention import final_statistics
from jaxpar.models.blocks.kernel import (
    FinalStatistics,
    KernelSums,
    Keys,
    Queries,
    accumulate,
    accumulate_grads,
    accumulator_dtype,
    finalize,
    initial_sums,
    tie,
    zero_grads,
)
from jaxpar.models.blocks.pairs import join_heads, join_keys, split_heads, split_keys
from jaxpar.parallel.techniques.ring_attention.block_tables import BlockTables
from jaxpar.parallel.techniques.ring_attention.ring_devices import RingDevices


@dataclass(frozen=True)
class PlainBlockAttention:
    """Implements `BlockAttention` by loops over tables of block pairs.

    Attributes:
      ways: The devices of the ring.
      tables: The block tables.
      groups: Number of heads of keys in a group of devices.
      segments: Segments of all tokens [b, s], or None.
    """

    ways: RingDevices
    tables: BlockTables
    groups: int
    segments: jax.Array | None

    def prepare(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Splits queries, and keys and values, into blocks."""
        return split_heads(q, self.tables.queries, self.groups), split_keys(k, v, self.tables.keys)

    def queries(self, q: jax.Array) -> Queries:
        """Returns the group's queries with their positions and segments."""
        return tie(Queries(q, *self.tables.positions(self.ways.group, self.segments, self.tables.queries)))

    def _keys(self, kv: jax.Array, whose: jax.Array) -> Keys:
        """Returns keys and values with the positions and segments of their group."""
        return tie(Keys(kv, *self.tables.positions(whose, self.segments, self.tables.keys)))

    def attend_local(self, queries: Queries, kv: jax.Array) -> KernelSums:
        """Returns the sums over the group's own keys."""
        keys = self._keys(kv, self.ways.group)
        return accumulate(initial_sums(queries.q), queries, keys, self.tables.local_table(), self.tables.rule)

    def attend_remote(self, sums: KernelSums, queries: Queries, kv: jax.Array, other: jax.Array) -> KernelSums:
        """Adds another group's keys to the sums."""
        table = self.tables.remote_table(self.ways.group, other)
        return accumulate(sums, queries, self._keys(kv, other), table, self.tables.rule)

    def finish(self, sums: KernelSums, dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns the output as a shard, and the logsumexp in blocks."""
        out, logsumexp = finalize(sums, dtype)
        return join_heads(out, self.tables.queries), logsumexp

    def backward_state(self, grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> FinalStatistics:
        """Bundles the arrays of the backward pass, in blocks."""
        grad, out = (split_heads(x, self.tables.queries, self.groups) for x in (grad, out))
        return final_statistics(grad, out, logsumexp)

    def local_gradients(self, queries: Queries, kv: jax.Array, end: FinalStatistics) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of queries and of the group's own keys."""
        zeros = jnp.zeros(queries.q.shape, accumulator_dtype(queries.q))
        walk = (self.tables.local_table(), self.tables.rule)
        return accumulate_grads((zeros, zero_grads(kv)), queries, self._keys(kv, self.ways.group), end, walk)

    def remote_gradients(
        self, of_q: jax.Array, queries: Queries, kv: jax.Array, end: FinalStatistics, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the terms of another group's keys to the gradients of queries; also returns these keys' gradients."""
        keys, table = self._keys(kv, other), self.tables.remote_table(self.ways.group, other)
        return accumulate_grads((of_q, zero_grads(kv)), queries, keys, end, (table, self.tables.rule))

    def gradients(self, of_q: jax.Array, of_kv: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Joins the blocks of the gradients."""
        of_k, of_v = join_keys(of_kv.astype(dtype), self.tables.keys)
        return join_heads(of_q, self.tables.queries).astype(dtype), of_k, of_v
