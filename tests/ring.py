"""Ring attention, as a test adds it to jaxpar: a file of its own, which knows the arguments of `jp.attention` alone.

device 0  q0 k0 v0      each turn every device scores its queries against the keys that it holds, and hands them on
device 1  q1 k1 v1      to the next one; numerators and denominators of the softmax are summed on the way
device 2  q2 k2 v2      (Liu, Zaharia, Abbeel 2023, arXiv:2310.01889; naive: nothing is skipped or overlapped)
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec as P

AXIS = "context"
calls = []


def ring(q, k, v, *, causal):
    calls.append(q.shape)
    cut = P(None, AXIS)
    local = jax.shard_map(partial(_local, causal=causal), axis_names={AXIS}, in_specs=(cut, cut, cut), out_specs=cut)
    return local(q, k, v)


def _local(q, k, v, *, causal):
    ways, here = jax.lax.axis_size(AXIS), jax.lax.axis_index(AXIS)
    (b, s, heads, dim), (t, groups) = q.shape, k.shape[1:3]
    q = q.reshape(b, s, groups, heads // groups, dim).astype(jnp.float32) / jnp.sqrt(dim).astype(jnp.float32)
    top, total, out = jnp.full(q.shape[:-1], -1e30), jnp.zeros(q.shape[:-1]), jnp.zeros(q.shape)
    for turn in range(ways):
        whose = (here - turn) % ways
        scores = jnp.einsum("bsgrk,btgk->bsgrt", q, k.astype(jnp.float32))
        if causal:
            seen = here * s + jnp.arange(s)[:, None] >= whose * t + jnp.arange(t)
            scores = jnp.where(seen[:, None, None, :], scores, -1e30)
        higher = jnp.maximum(top, scores.max(-1))
        shares, kept = jnp.exp(scores - higher[..., None]), jnp.exp(top - higher)
        total = total * kept + shares.sum(-1)
        out = out * kept[..., None] + jnp.einsum("bsgrt,btgk->bsgrk", shares, v.astype(jnp.float32))
        top = higher
        k, v = (jax.lax.ppermute(x, AXIS, [(i, (i + 1) % ways) for i in range(ways)]) for x in (k, v))
    return (out / total[..., None]).reshape(b, s, heads, dim).astype(v.dtype)
