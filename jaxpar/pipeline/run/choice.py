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

    def __call__(self, pred: jax.Array | bool, on_true: Callable[[], Tree], on_false: Callable[[], Tree]) -> Tree:
        """Returns the result of `on_true` if `pred` is true, else that of `on_false`."""
        # `where`, not a product with 0 or 1: stale slots may hold NaN or infinity, and 0 x NaN is NaN
        return jax.tree.map(lambda a, b: jnp.where(pred, a, b), on_true(), on_false())


class BranchChoice:
    """Computes one of two alternatives; an idle stage takes another branch and never calls this."""

    active = True

    def __call__(self, pred: jax.Array | bool, on_true: Callable[[], Tree], on_false: Callable[[], Tree]) -> Tree:
        """Returns the result of `on_true` if `pred` is true, else that of `on_false`."""
        return on_true() if pred is True else jax.lax.cond(pred, on_true, on_false)
