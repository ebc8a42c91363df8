"""Checks the fused kernel on the local device before a step uses it for parts of attention.

If the kernel defines logsumexp differently, or its gradients ignore the final statistics, training silently goes wrong.
So once per process, dtype and kind of heads, jaxpar computes a small attention over two parts of the keys, as a ring
does, and compares values and gradients with blockwise attention in plain JAX and float32.
"""

from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.errors import refuse
from jaxpar.models.blocks.attention import blockwise
from jaxpar.models.blocks.attention_mask import AttentionMask
from jaxpar.models.blocks.fused import FusedKernel, merge

TOKENS, GROUPS = 256, 2
# relative error, in the norm. Attention that rounds its weights and output to bfloat16 is off by
# 0.3 to 0.6 %, 8 times less in float16; gradients through JAX's own logsumexp, which has none, by 33 %
BAND = {"bfloat16": 0.02, "float16": 0.004}
WAY_OUT = "parallel.context_kernel = 'plain', which runs blocks of plain JAX; please report what was found"


@cache
def check_kernel(kernel: FusedKernel, dtype: str, head_dim: int, shared: int, window: int | None = None) -> None:
    """Compares parts of attention by a kernel with plain JAX, once per set of arguments.

    Args:
      kernel: The kernel.
      dtype: Dtype of the queries, bfloat16 or float16.
      head_dim: Size of a head.
      shared: Query heads per head of keys and values.
      window: As in `AttentionMask`, for one part with all tokens; None for two parts.

    Raises:
      JaxparError: If the results differ by more than `BAND`, or the kernel does not run.
    """
    subject = f"cuDNN's kernel for {dtype} heads of {head_dim} on {jax.local_devices()[0].device_kind}"
    # in its own thread, which does not share the caller's trace, mesh or settings
    with ThreadPoolExecutor(1) as pool:
        try:
            errors = pool.submit(
                relative_errors, kernel, dtype, head_dim=head_dim, shared=shared, window=window
            ).result()
        except jax.errors.JaxRuntimeError as error:
            raise refuse(
                f"{subject} does not run: {str(error).strip().splitlines()[0][:200]}",
                rule="a part of attention runs on the device before a step is made of it",
                fix=WAY_OUT,
            ) from error
    wrong = [f"{name} by {deviation:.1%}" for name, deviation in errors.items() if not deviation <= BAND[dtype]]
    if wrong:
        raise refuse(
            f"{subject} is off: {', '.join(wrong)}",
            rule=f"attention in parts by it differs from plain JAX in float32 by {BAND[dtype]:.1%} at most",
            fix=WAY_OUT,
        )


def relative_errors(
    kernel: FusedKernel, dtype: str, *, head_dim: int, shared: int, window: int | None = None
) -> Mapping[str, float]:
    """Computes the relative errors of the output and the gradients of q, k and v: |difference| / |expected|."""
    window = None if window is None else min(window, TOKENS // 2)  # a longer window would mask no key here
    rng = np.random.default_rng(0)
    sizes = (GROUPS * shared, GROUPS, GROUPS, GROUPS * shared)
    q, k, v, grad = (jnp.asarray(rng.normal(size=(1, TOKENS, heads, head_dim)), dtype) for heads in sizes)
    if window is None:
        grad = grad.at[:, : TOKENS // 2].set(0)  # results for the early half of queries, which the parts do not compute
    with jax.default_matmul_precision("highest"):
        exact = partial(blockwise, rule=AttentionMask(True, window))
        expected = jax.jit(partial(_forward_and_backward, exact))(*(x.astype(jnp.float32) for x in (q, k, v, grad)))
    attention = _run_two_calls if window is None else _run_one_call
    results = jax.jit(partial(attention, kernel, window))(q, k, v, grad)
    names = ("the output", "the gradient of q", "the gradient of k", "the gradient of v")
    return {name: _relative_error(*pair) for name, *pair in zip(names, results, _half(expected, window), strict=True)}


def _forward_and_backward(attention, q, k, v, grad):
    out, back = jax.vjp(attention, q, k, v)
    return out, *back(grad)


def _half(expected, window: int | None):
    """Selects the late half of outputs and gradients of queries: `_run_two_calls` computes only those."""
    out, dq, *key_grads = expected
    return (out, dq, *key_grads) if window is not None else (*(x[:, TOKENS // 2 :] for x in (out, dq)), *key_grads)


def _run_one_call(kernel: FusedKernel, window: int | None, q, k, v, grad):
    out, logsumexp = kernel.forward(q, k, v, causal=True, window=window)
    return out, *kernel.backward(q, k, v, out, logsumexp, grad, causal=True, window=window)


def _run_two_calls(kernel: FusedKernel, window: None, q, k, v, grad):
    """Attention of the late half of queries, first to the late keys, then to the early keys as in a ring."""
    half = TOKENS // 2
    q, grad = q[:, half:], grad[:, half:]
    parts = [(True, k[:, half:], v[:, half:]), (False, k[:, :half], v[:, :half])]
    (out, logsumexp), early_sums = (kernel.forward(q, *kv, causal=causal) for causal, *kv in parts)
    out, logsumexp = merge((out.astype(jnp.float32), logsumexp), early_sums)
    out = out.astype(q.dtype)
    late, early = (kernel.backward(q, *kv, out, logsumexp, grad, causal=causal) for causal, *kv in parts)
    dk, dv = (jnp.concatenate(pair, axis=1) for pair in zip(early[1:], late[1:], strict=True))
    return out, late[0].astype(jnp.float32) + early[0], dk, dv


def _relative_error(got: jax.Array, reference: jax.Array) -> float:
    result, expected = (np.asarray(x, np.float64) for x in (got, reference))
    return float(np.linalg.norm(result - expected) / np.linalg.norm(expected))
