"""Two implementations of an operation that only some stages do in a tick.

MaskedChoice   every stage computes both alternatives and selects one     phased tables: no conditional
BranchChoice   a stage computes one, inside its branch of `lax.switch`    tables that mix kinds of ops in a tick
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


class MaskedChoice:
    """Computes both alternatives and selects one; even NaNs in the other have no effect.

    Args:
      active: Whether this stage runs the op of the tick; an idle stage computes on stale data.
    """

    def __init__(self, active: jax.Array):
        self.active = active

    def __call__(self, take: jax.Array | bool, yes: Callable[[], Tree], no: Callable[[], Tree]) -> Tree:
        """Returns the result of `yes` if `take` is true, else that of `no`."""
        # `where`, not a product with 0 or 1: stale slots may hold NaN or infinity, and 0 x NaN is NaN
        return jax.tree.map(lambda a, b: jnp.where(take, a, b), yes(), no())


class BranchChoice:
    """Computes one of two alternatives; an idle stage takes another branch and never calls this."""

    active = True

    def __call__(self, take: jax.Array | bool, yes: Callable[[], Tree], no: Callable[[], Tree]) -> Tree:
        """Returns the result of `yes` if `take` is true, else that of `no`."""
        return yes() if take is True else jax.lax.cond(take, yes, no)
