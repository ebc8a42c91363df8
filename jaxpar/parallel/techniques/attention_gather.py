"""Attention that gathers keys and values: each device has a shard of the queries, and all keys (Llama 3, 3.3.2).

    q  [b, s/context, h, k]  ─────────────────────────────►  scores [.., s/context, t]  ─►  out [b, s/context, h, k]
    k, v [b, t/context, g, k]  ──all-gather──►  [b, t, g, k]  ──┘
                               ◄─reduce-scatter─  gradients

It derives the sharding of its arguments from the names of their dims. The axis may be `context`, or `tensor` if
sequence parallelism has fewer heads of keys than devices. If no axis splits a sequence, it is plain attention.

Suffixes of arrays: b batch, s queries, t keys, h heads, g heads of keys and values, r query heads per head of keys, k
head_dim.
"""

import math
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec

from jaxpar.models.blocks.attention import add_size
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.dim_names import constrain_to, get_spec
from jaxpar.models.islands import KEYS, QUERIES, single_device_attention

_WHOLE = ("batch", "keys", "kv_heads", "head_dim")
_SCORES = ("batch", "kv_heads", None, "seq", "keys")


def gather(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool, **masks: Any) -> jax.Array:
    """Attention of a device's queries to the keys of whole sequences.

    cuDNN's fused kernel cannot run on split sequences, so in 16 bits the scores are materialised in float32. A loop
    over blocks would not help: it runs the blocks in sequence, and every device would compute all of them.
    """
    k_btgk, v_btgk = _gather_sequences(k_btgk), _gather_sequences(v_btgk)
    low, splits = q_bshk.dtype in (jnp.bfloat16, jnp.float16), _splits()
    if splits:
        add_size(_scores_of_a_device(q_bshk.shape, k_btgk.shape[1]))
    attend = in_16_bits if low and splits else partial(single_device_attention, blocks=not splits)
    return attend(q_bshk, k_btgk, v_btgk, causal=causal, **masks)


def _gather_sequences(x_btgk: jax.Array) -> jax.Array:
    """Gathers keys or values of whole sequences, if an axis splits them."""
    local, full = get_spec(KEYS), get_spec(_WHOLE)
    return x_btgk if local == full else _move(x_btgk, full, local)


@partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _move(x: jax.Array, target: PartitionSpec, source: PartitionSpec) -> jax.Array:
    """Moves an array to the target spec, and its gradient back to the source spec.

    By default JAX constrains the gradient to the target spec too, so XLA would all-reduce it and then split it. If the
    gradient is constrained to the source spec, XLA uses a reduce-scatter, with half the bytes. The value is also first
    constrained to the source spec; otherwise XLA may gather the projection's inputs, and every device projects all
    keys.
    """
    return constrain_to(constrain_to(x, source), target)


_move.defvjp(
    lambda x, target, source: (_move(x, target, source), None),
    lambda target, source, _, gradient: (constrain_to(gradient, source),),
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
    """Attention with float32 scores whose matmuls, also in the backward pass, run in the dtype of `q`.

    Queries and keys have the dim order of the scores, so matmuls write scores and their gradients without a transpose,
    and the backward pass reads residuals in the layout in which they are written. With another order XLA stacks the
    residuals of all layers in another layout.
    """
    b, s, heads, head_dim = q_bshk.shape
    groups = k_btgk.shape[2]
    q_bgrsk = jnp.moveaxis(q_bshk.reshape(b, s, groups, heads // groups, head_dim), 1, 3)
    k_bgtk, v_bgtk = jnp.moveaxis(k_btgk, 1, 2), jnp.moveaxis(v_btgk, 1, 2)
    rule = AttentionMask(causal, window, softcap)
    scores = rule.cap(_scores(q_bgrsk, k_bgtk) / math.sqrt(head_dim))
    shares = _attention_weights(rule, jnp.dtype(q_bshk.dtype), get_spec(_SCORES), scores, segments)
    y_bgrsk = _after_weights(jnp.einsum("bgrst,bgtk->bgrsk", shares, v_bgtk), shares)
    return jnp.moveaxis(y_bgrsk, 3, 1).reshape(q_bshk.shape)


@jax.custom_vjp
def _after_weights(y: jax.Array, shares: jax.Array) -> jax.Array:
    """Identity on y whose gradient waits until the attention weights exist.

    Otherwise XLA computes their gradient while the scores are still live, and holds both.
    """
    return y


_after_weights.defvjp(
    lambda y, shares: (y, shares),
    lambda shares, gradient: (jax.lax.optimization_barrier((gradient, shares))[0], None),
)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _attention_weights(
    rule: AttentionMask, dtype: jnp.dtype, spec: PartitionSpec | None, scores: jax.Array, segments: jax.Array | None
) -> jax.Array:
    """Softmax of the unmasked scores, computed in float32, returned in 16 bits.

    The weights are the only residual of the scores: 2 bytes per score, as in Megatron-LM's fused softmax
    (arXiv:1909.08053). JAX would also save them in float32. They are constrained in both passes; otherwise XLA splits
    the residuals of a stage over keys, although the ops split queries.
    """
    # the barrier ties the mask and its fill value to the scores: else XLA computes both before its loop over layers, at
    # the size of the scores, and keeps them
    scores, least, zero = jax.lax.optimization_barrier(
        (scores, jnp.asarray(-0.5 * jnp.finfo(jnp.float32).max, jnp.float32), jnp.zeros((), jnp.int32))
    )
    s, t = scores.shape[-2:]
    if rule.causal or rule.window is not None or segments is not None:
        scores = jnp.where(rule.mask(jnp.arange(s) + zero, jnp.arange(t), segments, segments), scores, least)
    return _constrain(jax.nn.softmax(scores, axis=-1).astype(dtype), spec)


def _constrain(shares: jax.Array, spec: PartitionSpec | None) -> jax.Array:
    return shares if spec is None else constrain_to(shares, spec)


def _shares_forward(rule: AttentionMask, dtype: jnp.dtype, spec: PartitionSpec | None, scores: jax.Array, segments):
    shares = _attention_weights(rule, dtype, spec, scores, segments)
    return shares, shares


def _shares_backward(
    rule: AttentionMask, dtype: jnp.dtype, spec: PartitionSpec | None, shares: jax.Array, gradient: jax.Array
):
    shares, gradient = _constrain(shares, spec), _constrain(gradient, spec)
    # the barrier, also under recomputation: else XLA recomputes the weights from the scores, and keeps the scores
    shares, gradient = jax.lax.optimization_barrier((shares, gradient))
    wide, gradient = shares.astype(jnp.float32), gradient.astype(jnp.float32)
    return wide * (gradient - jnp.sum(wide * gradient, axis=-1, keepdims=True)), None


_attention_weights.defvjp(_shares_forward, _shares_backward)


@jax.custom_vjp
def _scores(q_bgrsk: jax.Array, k_bgtk: jax.Array) -> jax.Array:
    """Scores q k in float32, whose gradient is rounded to 16 bits before the next matmuls, as in fused kernels.

    With JAX's gradient these matmuls have a float32 operand, which halves their speed and doubles the bytes of the
    keys' gradients.
    """
    return jnp.einsum("bgrsk,bgtk->bgrst", q_bgrsk, k_bgtk, preferred_element_type=jnp.float32)


def _scores_backward(residuals: tuple[jax.Array, jax.Array], gradient: jax.Array) -> tuple[jax.Array, jax.Array]:
    q, k = residuals
    gradient = gradient.astype(q.dtype)
    return jnp.einsum("bgrst,bgtk->bgrsk", gradient, k), jnp.einsum("bgrst,bgrsk->bgtk", gradient, q)


_scores.defvjp(lambda q, k: (_scores(q, k), (q, k)), _scores_backward)


def _scores_of_a_device(shape: tuple[int, ...], keys: int) -> int:
    """Returns the bytes of a device's scores [batch, heads, queries, keys] in float32."""
    sizes, ways = jax.sharding.get_abstract_mesh().shape, 1
    for entry in get_spec(QUERIES) or ():
        if entry is not None and entry is not PartitionSpec.UNCONSTRAINED:
            axes = (entry,) if isinstance(entry, str) else entry
            ways *= math.prod(sizes[axis] for axis in axes)
    return 4 * math.prod(shape[:3]) * keys // ways


def _splits() -> bool:
    spec = get_spec(QUERIES)
    return spec is not None and spec[1] is not None
