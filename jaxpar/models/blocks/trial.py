"""A trial of the fused kernel, on the device that is here, before a step is made of its parts.

No number of it is taken on trust: with a logsumexp of another kind, or gradients that leave out what the final
statistics say, training goes on without a word, and wrong. So once per process, dtype and kind of heads a small
attention in two parts, as a ring runs it, is compared with attention in blocks of plain JAX in float32, values and
gradients.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.fused import Fused, merged
from jaxpar.models.blocks.rule import Rule

TOKENS, GROUPS = 256, 2
# norm of the difference to that of what is right. Attention that rounds its shares and output to bfloat16 is off by
# 0.3 to 0.6 %, 8 times less in float16; gradients through JAX's own logsumexp, which has none, by 33 %
BAND = {"bfloat16": 0.02, "float16": 0.004}
WAY_OUT = "parallel.context_kernel = 'plain', which runs blocks of plain JAX; please report what was found"


@cache
def try_out(kernel: Fused, dtype: str, head_dim: int, shared: int, window: int | None = None) -> None:
    """Compares parts of attention by a kernel with plain JAX, once for each of these.

    Args:
      kernel: The kernel.
      dtype: Of queries: bfloat16 or float16.
      head_dim: Size of a head.
      shared: Heads that share one of keys and values.
      window: As in `Rule`, of one part that is all tokens; None for two parts.

    Raises:
      JaxparError: If they are further apart than `BAND`, or if the kernel does not run.
    """
    what = f"cuDNN's kernel for {dtype} heads of {head_dim} on {jax.local_devices()[0].device_kind}"
    # in a thread of its own, that has no part in the trace, mesh or settings of who asks
    with ThreadPoolExecutor(1) as pool:
        try:
            found = pool.submit(off, kernel, dtype, head_dim=head_dim, shared=shared, window=window).result()
        except jax.errors.JaxRuntimeError as error:
            raise refuse(
                f"{what} does not run: {str(error).strip().splitlines()[0][:200]}",
                rule="a part of attention runs on the device before a step is made of it",
                fix=WAY_OUT,
            ) from error
    wrong = [f"{name} by {share:.1%}" for name, share in found.items() if not share <= BAND[dtype]]
    if wrong:
        raise refuse(
            f"{what} is off: {', '.join(wrong)}",
            rule=f"attention in parts by it differs from plain JAX in float32 by {BAND[dtype]:.1%} at most",
            fix=WAY_OUT,
        )


def off(kernel: Fused, dtype: str, *, head_dim: int, shared: int, window: int | None = None) -> Mapping[str, float]:
    """Returns how far the output and the gradients of q, k and v are from what is right, as shares of their norms."""
    window = None if window is None else min(window, TOKENS // 2)  # a longer one would hide no key here
    rng = np.random.default_rng(0)
    sizes = (GROUPS * shared, GROUPS, GROUPS, GROUPS * shared)
    q, k, v, grad = (jnp.asarray(rng.normal(size=(1, TOKENS, heads, head_dim)), dtype) for heads in sizes)
    if window is None:
        grad = grad.at[:, : TOKENS // 2].set(0)  # of the early half of queries, which the parts leave out
    with jax.default_matmul_precision("highest"):
        exact = partial(blockwise, rule=Rule(True, window))
        wanted = jax.jit(partial(_both, exact))(*(x.astype(jnp.float32) for x in (q, k, v, grad)))
    run = _in_two if window is None else _in_one
    got = jax.jit(partial(run, kernel, window))(q, k, v, grad)
    names = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
    return {name: _apart(*pair) for name, *pair in zip(names, got, _late(wanted, window), strict=True)}


def _both(attention, q, k, v, grad):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(grad)


def _late(wanted, window: int | None):
    """Returns of outputs and gradients of queries those that `_in_two` makes: those of the late half."""
    out, of_q, *rest = wanted
    return (out, of_q, *rest) if window is not None else (*(x[:, TOKENS // 2 :] for x in (out, of_q)), *rest)


def _in_one(kernel: Fused, window: int | None, q, k, v, grad):
    out, logsumexp = kernel.forward(q, k, v, causal=True, window=window)
    return out, *kernel.backward(q, k, v, out, logsumexp, grad, causal=True, window=window)


def _in_two(kernel: Fused, window: None, q, k, v, grad):
    """Returns what the late half of queries makes of its own keys, and of the early ones, which came from elsewhere."""
    half = TOKENS // 2
    q, grad = q[:, half:], grad[:, half:]
    parts = [(True, k[:, half:], v[:, half:]), (False, k[:, :half], v[:, :half])]
    (out, logsumexp), more = (kernel.forward(q, *kv, causal=causal) for causal, *kv in parts)
    out, logsumexp = merged((out.astype(jnp.float32), logsumexp), more)
    out = out.astype(q.dtype)
    own, early = (kernel.backward(q, *kv, out, logsumexp, grad, causal=causal) for causal, *kv in parts)
    of_k, of_v = (jnp.concatenate(pair, axis=1) for pair in zip(early[1:], own[1:], strict=True))
    return out, own[0].astype(jnp.float32) + early[0], of_k, of_v


def _apart(got: jax.Array, wanted: jax.Array) -> float:
    found, right = (np.asarray(x, np.float64) for x in (got, wanted))
    return float(np.linalg.norm(found - right) / np.linalg.norm(right))
