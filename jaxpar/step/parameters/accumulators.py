"""Dtypes of sums of gradients.

float16, bfloat16    float32: a sum of many gradients overflows float16, and stops growing in bfloat16
float32, float64     their own
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxpar.sharding.names import Tree
from jaxpar.step.losses import divisor


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype in which gradients of a parameter of this dtype are added up."""
    return jnp.dtype(jnp.float32) if is_short(dtype) else jnp.dtype(dtype)


def is_short(dtype: jnp.dtype) -> bool:
    """Returns whether a dtype is floating point of fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def computes_in(jaxpr: Jaxpr, dtype: Any) -> bool:
    """Returns whether an equation makes an array of this dtype, also inside of loops, branches and calls."""
    for eqn in jaxpr.eqns:
        if any(getattr(var.aval, "dtype", None) == dtype for var in eqn.outvars):
            return True
        if any(computes_in(inner, dtype) for inner in jaxprs_in_params(eqn.params)):
            return True
    return False


def weighted(gradients: Tree, count: jax.Array) -> Tree:
    """Returns gradients of a sum, in the dtype of accumulators, for those of its mean over `count`."""
    return jax.tree.map(lambda x: x.astype(wide := accumulator_dtype(x.dtype)) * count.astype(wide), gradients)


def divided(gradients: Tree, count: jax.Array, like: Tree) -> Tree:
    """Returns gradients of a mean over `count` for accumulators of the sum, cast to the dtypes of `like` afterwards."""
    by = divisor(count)
    return jax.tree.map(lambda x, leaf: (x / by.astype(x.dtype)).astype(leaf.dtype), gradients, like)
