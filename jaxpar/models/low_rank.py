"""A matrix with a low-rank correction: one array to the model that reads it.

Written down, W + A B is as large as W, and so is its gradient. Hence it is a call of this name, which a step finds in
the program of the model and, where it is multiplied with, replaces by products with W, A and B: see
`pipeline/jaxprs/beside.py`. Anything else, such as a lookup, reads the sum.
"""

import jax
import jax.numpy as jnp

NAME = "low_rank_sum"


def low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array, *, lead: int = 0) -> jax.Array:
    """Returns W + A B; of a stack that is read whole, before it is sliced, that of each layer, written down.

    Args:
      base: W. Shape [*inputs, *outputs].
      first: A. Shape [*inputs, rank].
      second: B, scaled. Shape [rank, *outputs].
      lead: Dims before these that all three have, of a stack.
    """
    add = _called if lead == 0 else _low_rank_sum
    for _ in range(lead):
        add = jax.vmap(add)
    return add(base, first, second)


def _low_rank_sum(base: jax.Array, first: jax.Array, second: jax.Array) -> jax.Array:
    return base + jnp.tensordot(first, second, axes=1).astype(base.dtype)


_low_rank_sum.__name__ = NAME
_called = jax.jit(_low_rank_sum)
