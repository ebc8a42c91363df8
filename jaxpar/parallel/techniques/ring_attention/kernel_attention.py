"""Attention of queries to rotating keys in calls of a fused kernel, whose squares are causal or full.

    causal, zigzag      own shard           a group before      a group after        (calls)
    keys                early  late         early  late         early  late
    early queries       half                2
    late queries        all    half         1                   1      2

A device's own shard is one causal call, although it is two chunks: the early chunk precedes the late one, so the causal
mask of the shard is that of the sequence. With the keys of another group, two of the four pairs of chunks are unmasked,
each completely: late queries with early keys, and either early queries with early keys, or late queries with late keys.
Slice offsets choose between the last two, so that all devices run the same calls.

A call returns its output in 16 bits and its logsumexp in float32. Sums over calls are in float32, and so are gradients.
"""

from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.fused import FusedKernel, merge
from jaxpar.models.blocks.kernel import accumulator_dtype, zero_grads
from jaxpar.parallel.techniques.ring_attention.ring import RingDevices


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
