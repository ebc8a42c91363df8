"""Dtypes of sums of gradients.

float16, bfloat16    float32: a sum of many gradients overflows float16, and stops growing in bfloat16
float32, float64     unchanged
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params

from jaxpar.sharding.names import Tree
from jaxpar.step.losses import nonzero_count


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype for sums of gradients of a parameter of this dtype."""
    return jnp.dtype(jnp.float32) if is_short(dtype) else jnp.dtype(dtype)


def is_short(dtype: jnp.dtype) -> bool:
    """Whether a dtype is floating point with fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def computes_in(jaxpr: Jaxpr, dtype: Any) -> bool:
    """Whether an equation makes an array of this dtype, also inside loops, branches and calls."""
    for eqn in jaxpr.eqns:
        if any(getattr(var.aval, "dtype", None) == dtype for var in eqn.outvars):
            return True
        if any(computes_in(inner, dtype) for inner in jaxprs_in_params(eqn.params)):
            return True
    return False


def multiply_by_count(gradients: Tree, count: jax.Array) -> Tree:
    """Multiplies gradients of a mean by `count`: gradients of the sum, in the accumulator dtype."""
    return jax.tree.map(lambda x: x.astype(wide := accumulator_dtype(x.dtype)) * count.astype(wide), gradients)


def divide_by_count(gradients: Tree, count: jax.Array, like: Tree) -> Tree:
    """Divides gradients of a sum by `count`, and casts them to the dtypes of `like`."""
    denominator = nonzero_count(count)
    return jax.tree.map(lambda x, leaf: (x / denominator.astype(x.dtype)).astype(leaf.dtype), gradients, like)
