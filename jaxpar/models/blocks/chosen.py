"""When attention on one device runs block by block: above so many keys, where no fused kernel runs it.

                      up to LONG keys       more
cuDNN can run it      cuDNN's kernel        cuDNN's kernel    (keeps no scores; on GPUs, in 16 bits, without segments)
it cannot             jax.nn's matmuls      block by block

Heads have to fit cuDNN's kernel too: a multiple of 8, at most 256 from Hopper on and 128
before it, as JAX's own check has it.

jax.nn's matmuls keep the scores of a layer: at LONG keys 256 MiB a head and row in float32. Below, they are faster than
a loop over blocks: one large matmul instead of many small ones.
"""

import jax

from jaxpar.models.settings import cudnn

LONG = 8192


def fits_cudnn(q: jax.Array, *, causal: bool, window: int | None = None, segments: jax.Array | None = None) -> bool:
    """Returns whether cuDNN's kernel runs attention here: GPUs, 16 bits, heads that fit, no segments, and a window only
    if causal.
    """
    return wants_cudnn(q) and head_fits(q.shape[-1]) and segments is None and (window is None or causal)


def wants_cudnn(q: jax.Array) -> bool:
    """Returns whether queries are on GPUs and in the 16 bits that cuDNN's kernel computes in."""
    return str(q.dtype) in cudnn.DTYPES and jax.default_backend() == "gpu"


def head_fits(head_dim: int) -> bool:
    """Returns whether cuDNN's kernel has heads of this size on the GPUs here."""
    return cudnn.head_fits(head_dim, capability())


def capability() -> float:
    """Returns the compute capability of the GPUs here; absent or simulated ones state none, and are from Hopper on."""
    return float(getattr(jax.local_devices()[0], "compute_capability", cudnn.HOPPER))


def in_blocks(k: jax.Array, *, fused: bool) -> bool:
    """Returns whether attention to these keys runs block by block."""
    return k.shape[1] > LONG and not fused
