"""Two ways for a stage to do something that not all stages do in the same tick.

Masked   every stage computes both alternatives and keeps one       phased tables: no conditional in the program
Chosen   a stage computes one, inside its branch of `lax.switch`    tables that mix kinds of ops in a tick
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


class Masked:
    """Computes both alternatives and keeps one: the other leaves no trace, not even NaN.

    Args:
      active: Whether this stage does the op of the tick; an idle one computes on stale data.
    """

    def __init__(self, active: Any):
        self.active = active

    def __call__(self, take: Any, yes: Callable[[], Tree], no: Callable[[], Tree]) -> Tree:
        """Returns the result of `yes` where `take` holds, else that of `no`."""
        # `where`, not a product with 0 or 1: stale slots may hold NaN or infinity, and 0 x NaN is NaN
        return jax.tree.map(lambda a, b: jnp.where(take, a, b), yes(), no())


class Chosen:
    """Computes one of two alternatives; an idle stage is in another branch and never gets here."""

    active = True

    def __call__(self, take: Any, yes: Callable[[], Tree], no: Callable[[], Tree]) -> Tree:
        """Returns the result of `yes` where `take` holds, else that of `no`."""
        return yes() if take is True else jax.lax.cond(take, yes, no)
