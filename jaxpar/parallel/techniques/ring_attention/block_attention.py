"""Attention of queries to rotating keys: in calls of a fused kernel, or block by block in plain JAX.

The kernel's squares are causal or full:

    causal, zigzag      own shard           a group before      a group after        (calls)
    keys                early  late         early  late         early  late
    early queries       half                2
    late queries        all    half         1                   1      2

A device's own shard is one causal call, although it is two chunks: the early chunk precedes the late one, so the causal
mask of the shard is that of the sequence. With the keys of another group, two of the four pairs of chunks are unmasked,
each completely: late queries with early keys, and either early queries with early keys, or late queries with late keys.
Slice offsets choose between the last two, so that all devices run the same calls. A call returns its output in 16 bits
and its logsumexp in float32. Sums over calls are in float32, and so are gradients.

Plain JAX has any mask, any dtype, any device. The tables of the block pairs to compute in each ring step have the same
length on all devices:

    causal, zigzag      own shard               a shard of a group before      a shard of a group after
    keys                early  late             early  late                    early  late
    early queries       half                    all
    late queries        all    half             all                            all    all

Late queries always attend to early keys. In addition, early queries attend to early keys, or late queries to late keys.
Each device selects the rows of its table by index, because JAX would differentiate a conditional on the device wrongly,
and devices would wait for each other. So in a ring step every device computes half of the square; for its own shard,
3/4.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention import final_statistics
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.fused import FusedKernel, merge
from jaxpar.models.blocks.kernel import (
    Blocks,
    FinalStatistics,
    KernelSums,
    Keys,
    Queries,
    Table,
    accumulate,
    accumulate_grads,
    accumulator_dtype,
    all_pairs,
    finalize,
    initial_sums,
    join_heads,
    join_keys,
    pairs,
    split_heads,
    split_keys,
    split_positions,
    split_segments,
    tie,
    zero_grads,
)
from jaxpar.parallel.techniques.ring_attention.ring import RingDevices, zigzag_chunks


class BackwardState(NamedTuple):
    """Arrays for the backward pass, after queries have attended to all keys."""

    out: jax.Array  # [b, s, h, k]
    logsumexp: jax.Array  # [b, h, s]
    grad: jax.Array  # [b, s, h, k]

    def chunk(self, start: int | jax.Array, size: int) -> "BackwardState":
        """Slices one chunk of queries."""
        return BackwardState(
            _slice_tokens(self.out, start, size),
            _slice_tokens(self.logsumexp, start, size, 2),
            _slice_tokens(self.grad, start, size),
        )


@dataclass(frozen=True)
class KernelAttention:
    """Implements `BlockAttention` by calls of a kernel. Keys and values are one array [2, b, t, g, k].

    Attributes:
      ways: The devices of the ring.
      rule: The mask; a window is only possible if one group has all tokens.
      kernel: The kernel.
    """

    ways: RingDevices
    rule: AttentionMask
    kernel: FusedKernel

    def prepare(self, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Returns queries unchanged, and keys and values as one array."""
        return q, jnp.stack([k, v])

    def queries(self, q: jax.Array) -> jax.Array:
        """Returns queries unchanged."""
        return q

    def attend_local(self, queries: jax.Array, kv: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Attends to the device's own keys; returns the output in float32, and the logsumexp."""
        out, logsumexp = self.kernel.forward(queries, *kv, causal=self.rule.causal, window=self.rule.window)
        return (out if self.ways.ring == 1 else out.astype(accumulator_dtype(out))), logsumexp

    def attend_remote(
        self, sums: tuple[jax.Array, jax.Array], queries: jax.Array, kv: jax.Array, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Attends to another group's keys, and merges the results into the output and the logsumexp."""
        if not self.rule.causal:
            return merge(sums, self.kernel.forward(queries, *kv, causal=False))
        for start_q, start_k, (size_q, size_k) in _squares(self.ways.group, queries, kv, other):
            q, (k, v) = _slice_tokens(queries, start_q, size_q), _slice_tokens(kv, start_k, size_k, 2)
            part = self.kernel.forward(q, k, v, causal=False)
            out, logsumexp = sums
            total = merge((_slice_tokens(out, start_q, size_q), _slice_tokens(logsumexp, start_q, size_q, 2)), part)
            sums = _update_tokens(out, total[0], start_q), _update_tokens(logsumexp, total[1], start_q, 2)
        return sums

    def finish(self, sums: tuple[jax.Array, jax.Array], dtype: np.dtype) -> tuple[jax.Array, jax.Array]:
        """Returns the output, in the dtype of queries, and the logsumexp."""
        return sums[0].astype(dtype), sums[1]

    def backward_state(self, grad: jax.Array, out: jax.Array, logsumexp: jax.Array) -> BackwardState:
        """Bundles the arrays of the backward pass."""
        return BackwardState(out, logsumexp, grad)

    def local_gradients(self, queries: jax.Array, kv: jax.Array, end: BackwardState) -> tuple[jax.Array, jax.Array]:
        """Returns the gradients of queries and of the device's own keys."""
        return self._block_gradients(queries, kv, end, causal=self.rule.causal, window=self.rule.window)

    def remote_gradients(
        self, of_q: jax.Array, queries: jax.Array, kv: jax.Array, end: BackwardState, other: jax.Array
    ) -> tuple[jax.Array, jax.Array]:
        """Adds the terms of another group's keys to the gradients of queries; also returns these keys' gradients."""
        if not self.rule.causal:
            part_q, grads_kv = self._block_gradients(queries, kv, end, causal=False)
            return of_q + part_q, grads_kv
        grads_kv = zero_grads(kv)
        for start_q, start_k, (size_q, size_k) in _squares(self.ways.group, queries, kv, other):
            q, keys = _slice_tokens(queries, start_q, size_q), _slice_tokens(kv, start_k, size_k, 2)
            part_q, part_kv = self._block_gradients(q, keys, end.chunk(start_q, size_q), causal=False)
            of_q = _update_tokens(of_q, _slice_tokens(of_q, start_q, size_q) + part_q, start_q)
            grads_kv = _update_tokens(grads_kv, _slice_tokens(grads_kv, start_k, size_k, 2) + part_kv, start_k, 2)
        return of_q, grads_kv

    def gradients(self, of_q: jax.Array, of_kv: jax.Array, dtype: np.dtype) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Returns the gradients of q, k and v in the dtype of queries."""
        of_k, of_v = of_kv.astype(dtype)
        return of_q.astype(dtype), of_k, of_v

    def _block_gradients(
        self, q: jax.Array, kv: jax.Array, end: BackwardState, **mask: Any
    ) -> tuple[jax.Array, jax.Array]:
        of_q, of_k, of_v = self.kernel.backward(q, *kv, end.out, end.logsumexp, end.grad, **mask)
        return of_q.astype(accumulator_dtype(q)), jnp.stack([of_k, of_v]).astype(accumulator_dtype(q))


def _squares(group: Any, q: jax.Array, kv: jax.Array, other: jax.Array) -> list[tuple]:
    """Returns (start of queries, start of keys, sizes) of the two unmasked pairs of chunks."""
    sizes = size_q, size_k = q.shape[1] // 2, kv.shape[2] // 2
    earlier = other < group
    return [(size_q, 0, sizes), (jnp.where(earlier, 0, size_q), jnp.where(earlier, 0, size_k), sizes)]


def _slice_tokens(x: jax.Array, start: int | jax.Array, size: int, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_slice_in_dim(x, start, size, axis)


def _update_tokens(x: jax.Array, part: jax.Array, start: int | jax.Array, axis: int = 1) -> jax.Array:
    return jax.lax.dynamic_update_slice_in_dim(x, part, start, axis)


@dataclass(frozen=True)
class BlockTables:
    """The chunks of a ring, and the block tables of its steps.

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
      groups: Number of heads of keys on a device of the axis `context`; each serves a group of query heads.
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
