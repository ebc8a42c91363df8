"""Adds a low-rank correction to a matrix (LoRA); the model reads the sum as one array.

A materialized W + A B is as large as W, and so is its gradient. Hence the sum is a jitted call with a fixed name, which
a step finds in the traced model. If the sum is an operand of a matmul, the step replaces it by products with W, A and
B: see `jaxprs/low_rank_path.py`. Any other use, such as a lookup, reads the sum.
"""

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.int8 import dequantize

NAME = "low_rank_sum"


def low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array, lead: int = 0) -> jax.Array:
    """Computes W + A B; for a stack that the model reads before slicing it, the materialized sum of each layer.

    Args:
      base: W. Shape [*inputs, *outputs]; int8 with scales.
      first: A. Shape [*inputs, rank].
      second: B, scaled. Shape [rank, *outputs].
      *scales: If W is stored in 8 bits, one array of the scales of W's outputs. Shape [*outputs], float32.
      lead: Number of leading dims of a stack, which all arrays share.
    """
    add = _called if lead == 0 else _low_rank_sum
    for _ in range(lead):
        add = jax.vmap(add)
    return add(base, first, second, *scales)


def _low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array) -> jax.Array:
    base = dequantize(base, scales[0], second.dtype) if scales else base
    return base + jnp.tensordot(first, second, axes=1).astype(base.dtype)


_low_rank_sum.__name__ = NAME
_called = jax.jit(_low_rank_sum)
