"""Chooses attention on one device: blockwise above LONG keys, unless a fused kernel runs it.

                      up to LONG keys       more
cuDNN supports it     cuDNN's kernel        cuDNN's kernel    (stores no scores; on GPUs, in 16 bits, without segments)
cuDNN does not        jax.nn's matmuls      blockwise

Head sizes must fit cuDNN's kernel too: a multiple of 8, at most 256 from Hopper on and 128 before it, as in JAX's own
check.

jax.nn's matmuls store the scores of a layer: at LONG keys 256 MiB per head and sequence in float32. Below LONG they are
faster than a loop over blocks: one large matmul instead of many small ones.
"""

import jax

from jaxpar.models.settings import cudnn

LONG = 8192


def fits_cudnn(q: jax.Array, *, causal: bool, window: int | None = None, segments: jax.Array | None = None) -> bool:
    """Whether cuDNN's kernel runs attention here: GPUs, 16 bits, a head size it supports, no segments, and a window
    only if causal.
    """
    return wants_cudnn(q) and head_fits(q.shape[-1]) and segments is None and (window is None or causal)


def wants_cudnn(q: jax.Array) -> bool:
    """Whether queries are on GPUs and in the 16 bits that cuDNN's kernel computes in."""
    return str(q.dtype) in cudnn.DTYPES and jax.default_backend() == "gpu"


def head_fits(head_dim: int) -> bool:
    """Whether cuDNN's kernel supports this head size on the local GPUs."""
    return cudnn.head_fits(head_dim, capability())


def capability() -> float:
    """Compute capability of the local GPUs; Hopper's if the devices state none (absent or simulated GPUs)."""
    return float(getattr(jax.local_devices()[0], "compute_capability", cudnn.HOPPER))


def runs_blockwise(k: jax.Array, *, fused: bool) -> bool:
    """Whether attention to these keys runs blockwise."""
    return k.shape[1] > LONG and not fused
