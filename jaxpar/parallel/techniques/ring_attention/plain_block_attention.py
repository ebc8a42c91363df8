"""Attention of queries to rotating keys block by block, in plain JAX: any mask, any dtype, any device.

The tables of the block pairs to compute in each turn of a ring have the same length on all devices:

    causal, zigzag      own shard               a shard of a group before      a shard of a group after
    keys                early  late             early  late                    early  late
    early queries       half                    all
    late queries        all    half             all                            all    all

Late queries always attend to early keys. In addition, early queries attend to early keys, or late queries to late keys.
Each device selects the rows of its table by index, because JAX would differentiate a conditional on the device wrongly,
and devices would wait for each other. So in a turn every device computes half of the square; for its own shard, 3/4.
"""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention import final_statistics
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.kernel import (
    FinalStatistics,
    KernelSums,
    Keys,
    Queries,
    Table,
    accumulate,
    accumulate_grads,
    accumulator_dtype,
    finalize,
    initial_sums,
    tie,
    zero_grads,
)
from jaxpar.models.blocks.pairs import (
    Blocks,
    all_pairs,
    join_heads,
    join_keys,
    pairs,
    split_heads,
    split_keys,
    split_positions,
    split_segments,
)
from jaxpar.parallel.techniques.ring_attention.ring import RingDevices, zigzag_chunks


@dataclass(frozen=True)
class BlockTables:
    """The chunks of a ring, and the block tables of its turns.

    Attributes:
      rule: The mask: the keys that a query sees.
      ring: Number of groups.
      queries: Blocks of a chunk of queries.
      keys: Blocks of a chunk of keys.
    """

    rule: AttentionMask
    ring: int
    queries: Blocks
    keys: Blocks

    @property
    def zigzag(self) -> bool:
        """Whether a shard is an early and a late chunk; else it is one chunk."""
        return self.rule.causal and self.ring > 1

    def positions(self, group: jax.Array, segments_bs: jax.Array | None, blocks: Blocks) -> tuple:
        """Returns the positions [n, q] and segments [n, b, q] of a group's tokens, in blocks."""
        chunks = zigzag_chunks(group, self.ring) if self.zigzag else (group,)
        size = blocks.tokens
        positions = jnp.concatenate([chunk * size + jnp.arange(size) for chunk in chunks])
        if segments_bs is None:
            return split_positions(positions, blocks), None
        parts = [jax.lax.dynamic_slice_in_dim(segments_bs, chunk * size, size, axis=1) for chunk in chunks]
        return split_positions(positions, blocks), split_segments(jnp.concatenate(parts, axis=1), blocks)

    def local_table(self) -> Table:
        """Returns the block pairs of a group's own queries and keys."""
        if not self.zigzag:
            return pairs(self.rule, self.queries, self.keys)  # of one chunk, or of all tokens
        half, late_queries, late = pairs(self.rule, self.queries, self.keys), *self._late()
        return np.concatenate([half, self._full() + late_queries, half + late])

    def remote_table(self, group: jax.Array, other: jax.Array) -> Table:
        """Returns the block pairs of a group's queries and the keys of another."""
        full, (late_queries, late) = self._full(), self._late()
        if not self.zigzag:
            return full
        early_or_late = full + jnp.where(other < group, 0, late)
        return jnp.concatenate([full + late_queries, early_or_late])

    def _late(self) -> tuple[np.ndarray, np.ndarray]:
        """Index offsets from early blocks to pairs with late queries, and to pairs with late queries and late keys."""
        return np.array([self.queries.count, 0], np.int32), np.array([self.queries.count, self.keys.count], np.int32)

    def _full(self) -> np.ndarray:
        return all_pairs(self.queries, self.keys)


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
