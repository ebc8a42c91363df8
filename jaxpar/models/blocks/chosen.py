"""When attention on one device runs block by block: above so many keys, where no fused kernel runs it.

                      up to LONG keys       more
cuDNN can run it      cuDNN's kernel        cuDNN's kernel    (keeps no scores; on GPUs, in 16 bits, without segments)
it cannot             jax.nn's matmuls      block by block

jax.nn's matmuls keep the scores of a layer: at LONG keys 256 MiB a head and row in float32. Below, they are faster than
a loop over blocks: one large matmul instead of many small ones.
"""

import jax
import jax.numpy as jnp

LONG = 8192


def fits_cudnn(q: jax.Array, *, causal: bool, window: int | None, segments: jax.Array | None) -> bool:
    """Returns whether cuDNN's kernel runs attention here: GPUs, 16 bits, no segments, and a window only if causal."""
    low = q.dtype in (jnp.bfloat16, jnp.float16) and jax.default_backend() == "gpu"
    return low and segments is None and (window is None or causal)


def in_blocks(k: jax.Array, *, fused: bool) -> bool:
    """Returns whether attention to these keys runs block by block."""
    return k.shape[1] > LONG and not fused
