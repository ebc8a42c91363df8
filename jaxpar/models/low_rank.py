"""A matrix with a low-rank correction: one array to the model that reads it.

Written down, W + A B is as large as W, and so is its gradient. Hence it is a call of this name, which a step finds in
the program of the model and, where it is multiplied with, replaces by products with W, A and B: see
`pipeline/jaxprs/beside.py`. Anything else, such as a lookup, reads the sum.
"""

import jax
import jax.numpy as jnp

from jaxpar.models.blocks.eight_bits import as_floats

NAME = "low_rank_sum"


def low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array, lead: int = 0) -> jax.Array:
    """Returns W + A B; of a stack that is read whole, before it is sliced, that of each layer, written down.

    Args:
      base: W. Shape [*inputs, *outputs]; int8 with scales.
      first: A. Shape [*inputs, rank].
      second: B, scaled. Shape [rank, *outputs].
      *scales: By which W's outputs are multiplied, where it is kept in 8 bits: one array. Shape [*outputs], float32.
      lead: Dims before these that all three have, of a stack.
    """
    add = _called if lead == 0 else _low_rank_sum
    for _ in range(lead):
        add = jax.vmap(add)
    return add(base, first, second, *scales)


def _low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array) -> jax.Array:
    base = as_floats(base, scales[0], second.dtype) if scales else base
    return base + jnp.tensordot(first, second, axes=1).astype(base.dtype)


_low_rank_sum.__name__ = NAME
_called = jax.jit(_low_rank_sum)
