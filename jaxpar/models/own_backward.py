"""Functions with a backward pass of their own, where the one that JAX derives takes more memory.

    normalized(x, ...)   keeps its input and a number for each token; JAX would keep the input and what is normalized in
                         float32 beside it, and that in the dtype of `x`
    swiglu(gate, up)     keeps its two inputs; JAX would keep the sigmoid and silu(gate) beside them
    another(x)           is read by another matmul: XLA would join small ones, and keep copies of weights for that
    logits(x, head)      makes the gradient of the head as the head lies; JAX would transpose the gradient of the
                         logits and then the head's, each a copy of its size
    attended(q, k, v)    keeps the shares of each query, softmax(q k), which are the largest arrays of a layer; XLA
                         would compute them again from the scores, and keep those

Forward they are what they say, all but the last to the bit. These have a custom gradient and are no subject of
`jax.jvp`.
"""

import math
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

from jaxpar.models.named import axes_of, spec_of

AT_ONCE = 2**26  # bytes of a device's logits, above which their gradient is gone before the layers' backward pass
ALONE = 2**23  # bytes that it sends for the head's gradient: over NVLink some 30 us, several times what a launch costs


@partial(jax.custom_vjp, nondiff_argnums=(2, 3, 4))
def normalized(x: jax.Array, scale: jax.Array, eps: float, centered: bool, looped: bool = False) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps), in float32 and then in the dtype of `x`, times `scale`.

    Args:
      x: Shape [..., dim].
      scale: Shape [dim].
      eps: Added to the mean square.
      centered: Whether the mean of `x` is subtracted before.
      looped: Whether what made `x` is a loop: XLA may add up the gradient of the scale after its backward pass, and
        keep until then what it adds up, which is as large as `x`.
    """
    y = _wide(x, centered)
    return (y * _share(y, eps)).astype(x.dtype) * scale


def _wide(x: jax.Array, centered: bool) -> jax.Array:
    y = x.astype(jnp.float32)
    return y - jnp.mean(y, axis=-1, keepdims=True) if centered else y


def _share(y: jax.Array, eps: float) -> jax.Array:
    return jax.lax.rsqrt(jnp.mean(jnp.square(y), axis=-1, keepdims=True) + eps)


def _normalized_forward(x: jax.Array, scale: jax.Array, eps: float, centered: bool, looped: bool):
    y = _wide(x, centered)
    share = _share(y, eps)
    return (y * share).astype(x.dtype) * scale, (x, share, scale)


def _normalized_backward(eps: float, centered: bool, looped: bool, kept: tuple[jax.Array, ...], grad: jax.Array):
    x, share, scale = kept
    # numbers that are there when the gradient is: else XLA may find what is normalized in the forward pass, and keep it
    share, grad = jax.lax.optimization_barrier((share, grad))
    y = _wide(x, centered) * share
    to_y = (grad * scale).astype(jnp.float32)
    to_x = to_y - y * jnp.mean(to_y * y, axis=-1, keepdims=True)
    to_x = to_x - jnp.mean(to_y, axis=-1, keepdims=True) if centered else to_x
    to_x, terms = (share * to_x).astype(x.dtype), grad * y.astype(x.dtype)
    if looped and x.ndim == 3 and _rows_are_whole():
        # each row is added up when the loop begins, and nothing travels for that
        row = jnp.sum(terms, axis=1, dtype=jnp.float32).astype(terms.dtype)
        to_x, terms = jax.lax.optimization_barrier((to_x, row))
    to_scale = jax.lax.reduce_sum(terms, tuple(range(terms.ndim - 1)))  # devices send 16 bits
    return to_x, to_scale.astype(scale.dtype)


def _rows_are_whole() -> bool:
    """Returns whether the step that is traced leaves all tokens of a row to the same devices."""
    _, seq, _ = spec_of(("batch", "seq", "embed")) or (None,) * 3
    return not axes_of(seq)


normalized.defvjp(_normalized_forward, _normalized_backward)


def another(x: jax.Array) -> jax.Array:
    """Returns `x`, for a matmul with columns `mlp` that XLA is not to make one with another that reads `x`.

    It joins small ones, for which it copies each layer's slice of a stack of weights, and keeps that for the backward
    pass. Where the step cuts the columns, what is cut of `x` is gathered for both at once, and they stay as they are.
    Where nothing is recomputed, this is kept beside `x`: a matmul with a backward pass of its own would keep `x` alone,
    but policies of remat, adapters and casts would not find it in there.
    """
    (entry,) = spec_of(("mlp",)) or (None,)
    sizes = jax.sharding.get_abstract_mesh().shape
    return x if math.prod(sizes[axis] for axis in axes_of(entry)) > 1 else _another(x)


@jax.custom_vjp
def _another(x: jax.Array) -> jax.Array:
    return jax.lax.optimization_barrier(x)


_another.defvjp(lambda x: (_another(x), None), lambda _, grad: (grad,))


@jax.custom_vjp
def swiglu(gate: jax.Array, up: jax.Array) -> jax.Array:
    """Returns silu(gate) * up (arXiv:2002.05202), of their shape."""
    return jax.nn.silu(gate) * up


def _swiglu_backward(kept: tuple[jax.Array, jax.Array], grad: jax.Array) -> tuple[jax.Array, jax.Array]:
    # A sigmoid of the same numbers, but none that XLA finds in the forward pass and keeps from there: the zero is there
    # when the gradient is. A barrier around the inputs would do as well, but for GPUs it costs a copy of each where XLA
    # has made one matmul of the two that they come from
    gate, up = kept
    zero, grad = jax.lax.optimization_barrier((jnp.zeros((), gate.dtype), grad))
    share = jax.nn.sigmoid(gate + zero)
    made = grad * up * share * (1 + gate * (1 - share)), grad * gate * share
    # Weights' gradients read these with dims exchanged: XLA for processors would compute them again in that order,
    # walking four arrays across their rows, which takes twelve times what a copy takes
    return jax.lax.optimization_barrier(made)


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


def logits(x_bsd: jax.Array, head_dv: jax.Array, *, looped: bool = False) -> jax.Array:
    """Returns x @ head. Shape [batch, seq, vocab].

    Args:
      x_bsd: Shape [batch, seq, dim].
      head_dv: Shape [dim, vocab].
      looped: Whether what made `x` is a loop: XLA comes to the head's gradient before that or after, not in between.
    """
    device = _OfDevice.of(x_bsd.size // x_bsd.shape[-1], head_dv)
    return _logits(x_bsd, head_dv, device.logits > AT_ONCE or (looped and device.sent > ALONE))


@partial(jax.custom_vjp, nondiff_argnums=(2,))
def _logits(x_bsd: jax.Array, head_dv: jax.Array, at_once: bool) -> jax.Array:
    return jnp.einsum("bsd,dv->bsv", x_bsd, head_dv)


def _logits_backward(at_once: bool, kept: tuple[jax.Array, jax.Array], grad_bsv: jax.Array):
    x_bsd, head_dv = kept
    made = jnp.einsum("bsv,dv->bsd", grad_bsv, head_dv), jnp.einsum("bsd,bsv->dv", x_bsd, grad_bsv)
    made = made[0].astype(x_bsd.dtype), made[1].astype(head_dv.dtype)  # where one of the two is in 16 bits
    # both at once: XLA for GPUs would make the head's last of all, and keep the gradient of the logits until then. The
    # head's is then sent by itself, which small logits are not worth, or it is large enough for that
    return jax.lax.optimization_barrier(made) if at_once else made


_logits.defvjp(lambda x_bsd, head_dv, at_once: (_logits(x_bsd, head_dv, at_once), (x_bsd, head_dv)), _logits_backward)


@dataclass(frozen=True)
class _OfDevice:
    """Bytes of a device's logits, and those that it sends for the gradient of the head, by ring algorithms."""

    logits: float
    sent: float

    @staticmethod
    def of(tokens: int, head_dv: jax.Array) -> "_OfDevice":
        """Returns them as the step that is traced cuts logits of so many tokens; outside of one nothing is cut."""
        sizes, width = jax.sharding.get_abstract_mesh().shape, head_dv.dtype.itemsize
        batch, seq, vocab = map(axes_of, spec_of(("batch", "seq", "vocab")) or (None,) * 3)
        ways = lambda axes: math.prod(sizes[axis] for axis in axes)  # noqa: E731
        shards, gradient = ways([axis for axis in batch if axis == "fsdp"]), width * head_dv.size / ways(vocab)
        replicas = ways((*batch, *seq)) // shards
        sent = (1 - 1 / shards) * gradient + 2 * (1 - 1 / replicas) * gradient / shards
        return _OfDevice(width * tokens * head_dv.shape[1] / ways((*batch, *seq, *vocab)), sent)


def attended(q_bshk: jax.Array, k_btgk: jax.Array, v_btgk: jax.Array, *, causal: bool) -> jax.Array:
    """Returns attention in the dtype of its arguments: for float32, for which no kernel keeps the scores on the chip.

    Args:
      q_bshk: Queries. Shape [batch, queries, heads, head_dim].
      k_btgk: Keys. Shape [batch, keys, kv_heads, head_dim].
      v_btgk: Values. Shape of the keys.
      causal: Whether query i sees only the keys 0..i.

    Returns:
      Shape of the queries.
    """
    b, s, heads, head_dim = q_bshk.shape
    t, groups = k_btgk.shape[1:3]

    def of_one_head_each(q_bsgk: jax.Array) -> jax.Array:
        scores = jnp.einsum("bsgk,btgk->bgst", q_bsgk, k_btgk) * (1 / math.sqrt(head_dim))
        if causal:
            seen = jnp.arange(s)[:, None] >= jnp.arange(t)
            scores = jnp.where(seen, scores, -0.5 * jnp.finfo(scores.dtype).max)
        return jnp.einsum("bgst,btgk->bsgk", _softmax(scores), v_btgk)

    # mapped over the heads that share one of the keys: with these in the einsums, XLA transposes queries and results
    q_bsgrk = q_bshk.reshape(b, s, groups, heads // groups, head_dim)
    return jax.vmap(of_one_head_each, in_axes=3, out_axes=3)(q_bsgrk).reshape(q_bshk.shape)


@jax.custom_jvp
def _softmax(x: jax.Array) -> jax.Array:
    """Returns the softmax over the last dim."""
    return jax.nn.softmax(x, axis=-1)


@_softmax.defjvp
def _softmax_jvp(x: tuple[jax.Array], tangent: tuple[jax.Array]) -> tuple[jax.Array, jax.Array]:
    # JAX too takes the derivative from the result alone. But without the barrier XLA computes that a second time, from
    # the scores, for the backward pass
    shares = jax.lax.optimization_barrier(_softmax(*x))
    (change,) = tangent
    return shares, shares * (change - jnp.sum(shares * change, axis=-1, keepdims=True))
