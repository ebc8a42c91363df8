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
from jaxpar.models.blocks.whole_scores import note
from jaxpar.models.islands import KEYS, QUERIES, on_one_device
from jaxpar.models.named import constrain_to, spec_of

_WHOLE = ("batch", "keys", "kv_heads", "head_dim")
_SCORES = ("batch", "kv_heads", None, "seq", "keys")


def gather(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool, **masks: Any) -> jax.Array:
    """Returns attention of the queries that a device has to the keys of whole sequences.

    cuDNN's fused kernel cannot run on split sequences: in 16 bits the scores are materialised then, in float32. Nor is
    there a walk over blocks: it takes one after the other, and every device would make all of them.
    """
    k_btgk, v_btgk = _gathered(k_btgk), _gathered(v_btgk)
    low, splits = q_bshk.dtype in (jnp.bfloat16, jnp.float16), _splits()
    if splits:
        note(_scores_of_a_device(q_bshk.shape, k_btgk.shape[1]))
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
    return constrain_to(constrain_to(x, back), there)


_moved.defvjp(
    lambda x, there, back: (_moved(x, there, back), None),
    lambda there, back, _, gradient: (constrain_to(gradient, back),),
)


def in_16_bits(
    q_bshk: jax.Array,
    k_btgk: jax.Array,
    v_btgk: jax.Array,
    *,
    causal: bool,
    window: int | None = None,
    segments: jax.Array | None = None,
    softcap: float | None = None,
) -> jax.Array:
    """Returns attention whose scores are float32 and whose matmuls all run in the dtype of `q`, backward too.

    Dims of queries and keys have the order of those of scores: then matmuls make scores and their gradients as they
    lie, and what is kept is read as it was written. In another order XLA lays what all layers keep another way.
    """
    b, s, heads, head_dim = q_bshk.shape
    groups = k_btgk.shape[2]
    q_bgrsk = jnp.moveaxis(q_bshk.reshape(b, s, groups, heads // groups, head_dim), 1, 3)
    k_bgtk, v_bgtk = jnp.moveaxis(k_btgk, 1, 2), jnp.moveaxis(v_btgk, 1, 2)
    rule = Rule(causal, window, softcap)
    scores = rule.capped(_scores(q_bgrsk, k_bgtk) / math.sqrt(head_dim))
    shares = _shares(rule, jnp.dtype(q_bshk.dtype), spec_of(_SCORES), scores, segments)
    y_bgrsk = _after(jnp.einsum("bgrst,bgtk->bgrsk", shares, v_bgtk), shares)
    return jnp.moveaxis(y_bgrsk, 3, 1).reshape(q_bshk.shape)


@jax.custom_vjp
def _after(y: jax.Array, shares: jax.Array) -> jax.Array:
    """Returns `y`, whose gradient is there once the shares are: else that of the shares is made beside the scores."""
    return y


_after.defvjp(
    lambda y, shares: (y, shares),
    lambda shares, gradient: (jax.lax.optimization_barrier((gradient, shares))[0], None),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _shares(
    rule: Rule, dtype: jnp.dtype, spec: PartitionSpec | None, scores: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Returns softmax of the scores that are seen, computed in float32, in 16 bits.

    The backward pass reads these shares, and they are all that is kept of scores: 2 bytes for each, as Megatron-LM's
    fused softmax keeps it (arXiv:1909.08053). JAX would keep them in float32 besides. They are constrained both ways:
    left to XLA, slots of a stage have them cut over keys, where ops cut queries.
    """
    # the mask and what it fills in are there when the scores are: else XLA makes both before its loop over layers, of
    # the size of scores, and keeps them
    scores, least, zero = jax.lax.optimization_barrier(
        (scores, jnp.asarray(-0.5 * jnp.finfo(jnp.float32).max, jnp.float32), jnp.zeros((), jnp.int32))
    )
    s, t = scores.shape[-2:]
    if rule.causal or rule.window is not None or segments is not None:
        scores = jnp.where(rule.seen(jnp.arange(s) + zero, jnp.arange(t), segments, segments), scores, least)
    return _cut(jax.nn.softmax(scores, axis=-1).astype(dtype), spec)


def _cut(shares: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    return shares if spec is None else constrain_to(shares, spec)


def _shares_forward(rule: Rule, dtype: jnp.dtype, spec: PartitionSpec | None, scores: jax.Array, segments):
    shares = _shares(rule, dtype, spec, scores, segments)
    return shares, shares


def _shares_backward(rule: Rule, dtype: jnp.dtype, spec: PartitionSpec | None, shares: jax.Array, gradient: jax.Array):
    shares, gradient = _cut(shares, spec), _cut(gradient, spec)
    # read as they are, where they were made again too: else XLA computes them from the scores, and keeps those
    shares, gradient = jax.lax.optimization_barrier((shares, gradient))
    wide, gradient = shares.astype(jnp.float32), gradient.astype(jnp.float32)
    return wide * (gradient - jnp.sum(wide * gradient, axis=-1, keepdims=True)), None


_shares.defvjp(_shares_forward, _shares_backward)


@jax.custom_vjp
def _scores(q_bgrsk: jax.Array, k_bgtk: jax.Array) -> jax.Array:
    """Returns q k in float32; its gradient is rounded before the matmuls that take it, as in fused kernels.

    Left to JAX these have one operand in float32, which halves their speed and doubles the bytes of keys' gradients.
    """
    return jnp.einsum("bgrsk,bgtk->bgrst", q_bgrsk, k_bgtk, preferred_element_type=jnp.float32)


def _scores_backward(kept: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = kept
    gradient = gradient.astype(q.dtype)
    return jnp.einsum("bgrst,bgtk->bgrsk", gradient, k), jnp.einsum("bgrst,bgrsk->bgtk", gradient, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


def _scores_of_a_device(shape: tuple[int, ...], keys: int) -> int:
    """Returns the bytes of the scores [batch, heads, queries, keys] of a device, in float32."""
    sizes, ways = jax.sharding.get_abstract_mesh().shape, 1
    for entry in spec_of(QUERIES) or ():
        if entry is not None and entry is not PartitionSpec.UNCONSTRAINED:
            axes = (entry,) if isinstance(entry, str) else entry
            ways *= math.prod(sizes[axis] for axis in axes)
    return 4 * math.prod(shape[:3]) * keys // ways


def _splits() -> bool:
    """Returns whether devices split the sequence of queries."""
    spec = spec_of(QUERIES)
    return spec is not None and spec[1] is not None
