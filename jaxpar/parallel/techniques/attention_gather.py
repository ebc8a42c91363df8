"""Attention that gathers keys and values: each device has its queries of a sequence, and all keys (Llama 3, 3.3.2).

    q  [b, s/context, h, k]  ─────────────────────────────►  scores [.., s/context, t]  ─►  out [b, s/context, h, k]
    k, v [b, t/context, g, k]  ──all-gather──►  [b, t, g, k]  ──┘
                               ◄─reduce-scatter─  gradients

It asks how its arguments are cut by the names of their dims, whichever axes cut them: `context`, or `tensor` where
sequence parallelism finds fewer heads of keys than devices. Where nothing cuts a sequence it is that of one device.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, r heads that share one of those,
k head_dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.models.blocks.rule import Rule
from jaxpar.models.islands import KEYS, QUERIES, on_one_device
from jaxpar.models.named import spec_of

_WHOLE = ("batch", "keys", "kv_heads", "head_dim")


def gather(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool, **masks: Any) -> jax.Array:
    """Returns attention of the queries that a device has to the keys of whole sequences.

    cuDNN's fused kernel cannot run on split sequences: in 16 bits the scores are materialised then, in float32. Nor is
    there a walk over blocks: it takes one after the other, and every device would make all of them.
    """
    k_btgk, v_btgk = _gathered(k_btgk), _gathered(v_btgk)
    low, splits = q_bshk.dtype in (jnp.bfloat16, jnp.float16), _splits()
    attend = in_16_bits if low and splits else partial(on_one_device, blocks=not splits)
    return attend(q_bshk, k_btgk, v_btgk, causal=causal, **masks)


def _gathered(x_btgk: jax.Array) -> jax.Array:
    """Returns keys or values of whole sequences, where devices split them; else `x_btgk` itself."""
    own, whole = spec_of(KEYS), spec_of(_WHOLE)
    return x_btgk if own == whole else _moved(x_btgk, whole, own)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _moved(x: jax.Array, there: PartitionSpec, back: PartitionSpec) -> jax.Array:
    """Returns an array moved there, whose gradient is moved back.

    JAX's own rule constrains the gradient as it constrains the value: it would be made whole, by an all-reduce, and cut
    afterwards. Constrained to where the value came from, it is a reduce-scatter, of half the bytes. The value is
    constrained to that too: else XLA may gather what it is made of, and every device projects all keys.
    """
    return jax.lax.with_sharding_constraint(jax.lax.with_sharding_constraint(x, back), there)


_moved.defvjp(
    lambda x, there, back: (_moved(x, there, back), None),
    lambda there, back, _, gradient: (jax.lax.with_sharding_constraint(gradient, back),),
)


def in_16_bits(
    q_bshk: jax.Array,
    k_btgk: jax.Array,
    v_btgk: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    segments: jax.Array | None = None,
) -> jax.Array:
    """Returns attention whose scores are float32 and whose matmuls all run in the dtype of `q`, backward too."""
    b, s, heads, head_dim = q_bshk.shape
    t, groups = k_btgk.shape[1:3]
    scores = _scores(q_bshk.reshape(b, s, groups, heads // groups, head_dim), k_btgk) / math.sqrt(head_dim)
    if causal or window is not None or segments is not None:
        seen = Rule(causal, window).seen(jnp.arange(s), jnp.arange(t), segments, segments)
        scores = jnp.where(seen, scores, -0.5 * jnp.finfo(jnp.float32).max)
    shares = jax.nn.softmax(scores, axis=-1).astype(q_bshk.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", shares, v_btgk).reshape(q_bshk.shape)


@jax.custom_vjp
def _scores(q_bsgrk: jax.Array, k_btgk: jax.Array) -> jax.Array:
    """Returns q k in float32; its gradient is rounded before the matmuls that take it, as in fused kernels.

    Left to JAX these have one operand in float32, which halves their speed and doubles the bytes of keys' gradients.
    """
    return jnp.einsum("bsgrk,btgk->bgrst", q_bsgrk, k_btgk, preferred_element_type=jnp.float32)


def _scores_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = kept
    gradient = gradient.astype(q.dtype)
    return jnp.einsum("bgrst,btgk->bsgrk", gradient, k), jnp.einsum("bgrst,bsgrk->btgk", gradient, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


def _splits() -> bool:
    """Returns whether devices split the sequence of queries."""
    spec = spec_of(QUERIES)
    return spec is not None and spec[1] is not None
