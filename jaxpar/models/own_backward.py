"""Functions with a backward pass of their own, where the one that JAX derives takes more memory.

    swiglu(gate, up)     keeps its two inputs; JAX would keep the sigmoid and silu(gate) beside them
    logits(x, head)      makes the gradient of the head as the head lies; JAX would transpose the gradient of the
                         logits and then the head's, each a copy of its size

Forward they are what they say, to the bit. With a custom gradient they are no subject of `jax.jvp`.
"""

import jax
import jax.numpy as jnp


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
    return grad * up * share * (1 + gate * (1 - share)), grad * gate * share


swiglu.defvjp(lambda gate, up: (swiglu(gate, up), (gate, up)), _swiglu_backward)


@jax.custom_vjp
def logits(x_bsd: jax.Array, head_dv: jax.Array) -> jax.Array:
    """Returns x @ head. Shape [batch, seq, vocab]."""
    return jnp.einsum("bsd,dv->bsv", x_bsd, head_dv)


def _logits_backward(kept: tuple[jax.Array, jax.Array], grad_bsv: jax.Array) -> tuple[jax.Array, jax.Array]:
    x_bsd, head_dv = kept
    return jnp.einsum("bsv,dv->bsd", grad_bsv, head_dv), jnp.einsum("bsd,bsv->dv", x_bsd, grad_bsv)


logits.defvjp(lambda x_bsd, head_dv: (logits(x_bsd, head_dv), (x_bsd, head_dv)), _logits_backward)
