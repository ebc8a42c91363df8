"""Functions with a custom backward pass, which needs less memory than the one that JAX derives.

    normalized(x, ...)   saves its input and one number per token; JAX would save the input, the normalized values in
                         float32, and those again in the dtype of `x`
    swiglu(gate, up)     saves its two inputs; JAX would also save the sigmoid and silu(gate)
    geglu(gate, up)      saves its two inputs
    activate(x, name)    saves its input; JAX would also save three arrays of its size for a gelu by tanh
    unmerged_input(x)    keeps XLA from merging two matmuls that read x, for which it saves copies of weights
    logits(x, head)      computes the head's gradient in the head's layout; JAX would transpose the gradient of the
                         logits and then the head's, each a copy of its size
    float32_attention    saves the attention weights softmax(q k), the largest arrays of a layer; XLA would save the
                         scores and recompute the weights from them

The forward pass computes the plain function, bitwise equal in all but the last. All but the last are `custom_vjp` and
do not support `jax.jvp`.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.models.dim_names import get_spec, spec_axes

LARGE_LOGITS = 2**26  # bytes of logits per device, above which their gradient is freed before the layers' backward pass
LARGE_GRADIENT = 2**23  # bytes sent for the head's gradient: over NVLink some 30 us, several times the cost of a launch


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def normalize(x: jax.Array, scale: jax.Array, eps: float, centered: bool, looped: bool = False) -> jax.Array:
    """Computes x / sqrt(mean(x^2) + eps) in float32, casts it to the dtype of `x`, and multiplies by `scale`.

    Args:
      x: Shape [..., dim].
      scale: Shape [dim].
      eps: Added to the mean square.
      centered: Whether the mean of `x` is subtracted first.
      looped: Whether `x` comes from a loop: XLA may then sum the gradient of the scale only after the loop's backward
        pass, and hold its terms, as large as `x`, until then.
    """
    y = _float32_input(x, centered)
    return (y * _inverse_rms(y, eps)).astype(x.dtype) * scale


def _float32_input(x: jax.Array, centered: bool) -> jax.Array:
    y = x.astype(jnp.float32)
    return y - jnp.mean(y, axis=-1, keepdims=True) if centered else y


def _inverse_rms(y: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)


def _normalized_forward(x: jax.Array, scale: jax.Array, eps: float, centered: bool, looped: bool):
    y = _float32_input(x, centered)
    share = _inverse_rms(y, eps)
    return (y * share).astype(x.dtype) * scale, (x, share, scale)


def _normalized_backward(eps: float, centered: bool, looped: bool, residuals: tuple[jax.Array, ...], grad: jax.Array):
    x, share, scale = residuals
    # available only with the gradient: else XLA may reuse the normalized values of the forward pass, and hold them
    share, grad = jax.lax.optimization_barrier((share, grad))
    y = _float32_input(x, centered) * share
    grad_y = (grad * scale).astype(jnp.float32)
    grad_x = grad_y - y * jnp.mean(grad_y * y, axis=-1, keepdims=True)
    grad_x = grad_x - jnp.mean(grad_y, axis=-1, keepdims=True) if centered else grad_x
    grad_x, terms = (share * grad_x).astype(x.dtype), grad * y.astype(x.dtype)
    if looped and x.ndim == 3 and _sequences_are_unsharded():
        # each sequence is summed where the loop's backward pass begins, which needs no communication
        row = jnp.sum(terms, axis=1, dtype=jnp.float32).astype(terms.dtype)
        grad_x, terms = jax.lax.optimization_barrier((grad_x, row))
    grad_scale = jax.lax.reduce_sum(terms, tuple(range(terms.ndim - 1)))  # devices send 16 bits
    return grad_x, grad_scale.astype(scale.dtype)


def _sequences_are_unsharded() -> bool:
    """Whether the traced step leaves sequences unsharded."""
    _, seq, _ = get_spec(("batch", "seq", "embed")) or (None,) * 3
    return not spec_axes(seq)


normalize.defvjp(_normalized_forward, _normalized_backward)


def unmerged_input(x: jax.Array) -> jax.Array:
    """Identity on `x` that keeps XLA from merging this matmul (with columns `mlp`) with another matmul of `x`.

    To merge small matmuls, XLA copies each layer's slice of a stack of weights, and holds it for the backward pass. If
    the step shards the columns, one gather of `x` serves both matmuls, and `x` is returned unchanged. Without remat,
    the copy of `x` that this function returns is a residual in addition to `x`. A matmul with a custom backward pass
    would save only `x`, but remat policies, adapters and casts would then not recognize the matmul.
    """
    (entry,) = get_spec(("mlp",)) or (None,)
    sizes = jax.sharding.get_abstract_mesh().shape
    return x if math.prod(sizes[axis] for axis in spec_axes(entry)) > 1 else _unmerged_input(x)


@jax.custom_vjp
def _unmerged_input(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


_unmerged_input.defvjp(lambda x: (_unmerged_input(x), None), lambda _, grad: (grad,))


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Computes silu(gate) * up (arXiv:2002.05202), elementwise."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(residuals: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A sigmoid of the same numbers that XLA cannot share with the forward pass, and so does not hold: the zero exists
    # only with the gradient. A barrier around the inputs would do as well, but on GPUs it costs a copy of each if XLA
    # has merged the two matmuls that they come from
    gate, up = residuals
    zero, grad = jax.lax.optimization_barrier((jnp.zeros((), gate.dtype), grad))
    share = jax.nn.sigmoid(gate + zero)
    grads = grad * up * share * (1 + gate * (1 - share)), grad * gate * share
    # The weights' gradients read these with dims transposed: XLA for CPUs would recompute them in that order, reading
    # four arrays across their rows, which takes twelve times as long as a copy
    return jax.lax.optimization_barrier(grads)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def geglu(gate: jax.Array, up: jax.Array, approximate: bool) -> jax.Array:
    """Computes gelu(gate) * up (arXiv:2002.05202), elementwise; `approximate`: whether gelu is computed by tanh."""
    return jax.nn.gelu(gate, approximate=approximate) * up


def _geglu_backward(
    approximate: bool, residuals: tuple[jax.Array, jax.Array], grad: jax.Array
) -> tuple[jax.Array, jax.Array]:
    gate, up = residuals
    # as in swiglu: recomputed with the gradient, and both results written once
    zero, grad = jax.lax.optimization_barrier((jnp.zeros((), gate.dtype), grad))
    y, gradient = jax.vjp(partial(jax.nn.gelu, approximate=approximate), gate + zero)
    return jax.lax.optimization_barrier((*gradient(grad * up), grad * y))


geglu.defvjp(lambda gate, up, approximate: (geglu(gate, up, approximate), (gate, up)), _geglu_backward)


def activate(x: jax.Array, activation: str) -> jax.Array:
    """Applies silu, gelu or gelu_tanh elementwise; gelu is exact, gelu_tanh its approximation (arXiv:1606.08415)."""
    return _activate(x, activation)


@partial(jax.custom_vjp, nondiff_argnums=(1,))
def _activate(x: jax.Array, activation: str) -> jax.Array:
    return _plain_activation(x, activation)


def _plain_activation(x: jax.Array, activation: str) -> jax.Array:
    return jax.nn.silu(x) if activation == "silu" else jax.nn.gelu(x, approximate=activation == "gelu_tanh")


def _activate_backward(activation: str, x: jax.Array, grad: jax.Array) -> tuple[jax.Array]:
    zero, grad = jax.lax.optimization_barrier((jnp.zeros((), x.dtype), grad))  # as in swiglu
    _, gradient = jax.vjp(lambda x: _plain_activation(x, activation), x + zero)
    return jax.lax.optimization_barrier(gradient(grad))


_activate.defvjp(lambda x, activation: (_plain_activation(x, activation), x), _activate_backward)


def logits(x_bsd: jax.Array, head_dv: jax.Array, *, looped: bool = False) -> jax.Array:
    """Computes x @ head. Shape [batch, seq, vocab].

    Args:
      x_bsd: Shape [batch, seq, dim].
      head_dv: Shape [dim, vocab].
      looped: Whether `x` comes from a loop: XLA computes the head's gradient before or after that loop, not in between.
    """
    device = _DeviceBytes.measure_logits(x_bsd.size // x_bsd.shape[-1], head_dv)
    return _logits(x_bsd, head_dv, device.logits > LARGE_LOGITS or (looped and device.sent_bytes > LARGE_GRADIENT))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logits(x_bsd: jax.Array, head_dv: jax.Array, barrier: bool) -> jax.Array:
    return jnp.einsum("bsd,dv->bsv", x_bsd, head_dv)


def _logits_backward(barrier: bool, residuals: tuple[jax.Array, jax.Array], grad_bsv: jax.Array):
    x_bsd, head_dv = residuals
    grads = jnp.einsum("bsv,dv->bsd", grad_bsv, head_dv), jnp.einsum("bsd,bsv->dv", x_bsd, grad_bsv)
    grads = grads[0].astype(x_bsd.dtype), grads[1].astype(head_dv.dtype)  # where one of the two is in 16 bits
    # both at once: XLA for GPUs would compute the head's gradient last of all, and hold the gradient of the logits
    # until then. The head's gradient is then sent on its own: it pays for large logits or a large gradient
    return jax.lax.optimization_barrier(grads) if barrier else grads


_logits.defvjp(lambda x_bsd, head_dv, barrier: (_logits(x_bsd, head_dv, barrier), (x_bsd, head_dv)), _logits_backward)


def mask_padding(logits: jax.Array, vocab: int) -> jax.Array:
    """Makes logits [..., entries] from `vocab` on so low that they are never chosen and have no gradient."""
    if vocab == logits.shape[-1]:
        return logits
    entries = jax.lax.broadcasted_iota(jnp.int32, logits.shape, logits.ndim - 1)
    return jnp.where(entries < vocab, logits, -0.5 * jnp.finfo(logits.dtype).max)  # -inf minus -inf would be nan


@dataclass(frozen=True)
class _DeviceBytes:
    """Bytes of a device's logits, and bytes that it sends for the head's gradient by ring algorithms."""

    logits: float
    sent_bytes: float

    @staticmethod
    def measure_logits(tokens: int, head_dv: jax.Array) -> "_DeviceBytes":
        """Computes both for logits that are sharded as in the traced step; outside of a step they are unsharded."""
        sizes, width = jax.sharding.get_abstract_mesh().shape, head_dv.dtype.itemsize
        batch, seq, vocab = map(spec_axes, get_spec(("batch", "seq", "vocab")) or (None,) * 3)
        size = lambda axes: math.prod(sizes[axis] for axis in axes)  # noqa: E731
        shards, gradient = size([axis for axis in batch if axis == "fsdp"]), width * head_dv.size / size(vocab)
        replicas = size((*batch, *seq)) // shards
        sent_bytes = (1 - 1 / shards) * gradient + 2 * (1 - 1 / replicas) * gradient / shards
        return _DeviceBytes(width * tokens * head_dv.shape[1] / size((*batch, *seq, *vocab)), sent_bytes)


def float32_attention(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool) -> jax.Array:
    """Attention in the dtype of its arguments, for float32, for which no fused kernel exists.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of the keys.
      causal: Whether query i attends only to the keys 0..i.

    Returns:
      Shape of the queries.
    """
    b, s, heads, head_dim = q_bshk.shape
    t, groups = k_btgk.shape[1:3]

    def attend_heads(q_bsgk: jax.Array) -> jax.Array:
        scores = jnp.einsum("bsgk,btgk->bgst", q_bsgk, k_btgk) * (1 / math.sqrt(head_dim))
        if causal:
            mask = jnp.arange(s)[:, None] >= jnp.arange(t)
            scores = jnp.where(mask, scores, -0.5 * jnp.finfo(scores.dtype).max)
        return jnp.einsum("bgst,btgk->bsgk", _softmax(scores), v_btgk)

    # vmap over the heads that share a head of keys: with these in the einsums, XLA transposes queries and results
    q_bsgrk = q_bshk.reshape(b, s, groups, heads // groups, head_dim)
    return jax.vmap(attend_heads, in_axes=3, out_axes=3)(q_bsgrk).reshape(q_bshk.shape)


@jax.custom_jvp
def _softmax(x: jax.Array) -> jax.Array:
    return jax.nn.softmax(x, axis=-1)


@_softmax.defjvp
def _softmax_jvp(x: tuple[jax.Array], tangent: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # JAX too derives the gradient from the result alone. But without the barrier XLA recomputes the result, from the
    # scores, for the backward pass
    shares = jax.lax.optimization_barrier(_softmax(*x))
    (change,) = tangent
    return shares, shares * (change - jnp.sum(shares * change, axis=-1, keepdims=True))
