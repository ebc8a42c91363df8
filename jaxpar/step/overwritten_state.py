"""Model state whose new value is its gradient: the scales and maxima of Flax's fp8 matmuls (`flax.linen.fp8_ops`).

    state ─► every microbatch, from the same state ─► gradients of its mean loss by the state ─► their maximum

The backward pass of such a matmul returns the new state as a gradient, because a backward pass has no other outputs. A
step combines microbatches by the maximum, as Flax's dtype `fm32` combines two uses in one program.
"""

from collections.abc import Set

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, jaxprs_in_params
from jax.typing import DTypeLike

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, format_path
from jaxpar.step.losses import nonzero_count


def select_paths(paths: Set[str], state: Tree) -> Tree:
    """Returns the model state with None at all other paths."""
    return _map_paths(paths, lambda leaf: leaf, lambda _: None, state)


def replace_paths(paths: Set[str], state: Tree, new_state: Tree) -> Tree:
    """Returns the model state with the arrays of `new_state` at these paths."""
    return _map_paths(paths, lambda _, new: new, lambda old, _: old, state, new_state)


def fill_minus_infinity(paths: Set[str], state: Tree) -> Tree:
    """Returns the model state with minus infinity at these paths, the identity of the maximum."""
    return _map_paths(paths, lambda leaf: jnp.full_like(leaf, -jnp.inf), lambda leaf: leaf, state)


def maximum_at_paths(paths: Set[str], state: Tree, new_state: Tree) -> Tree:
    """Returns the model state after a microbatch, with the maximum of both at these paths."""
    return _map_paths(paths, jnp.maximum, lambda _, new: new, state, new_state)


def check_overwritten(layout: Layout) -> None:
    """Refuses a pipeline whose model has state that its gradient overwrites.

    Raises:
      JaxparError: If the model has such state.
    """
    if layout.blueprint.overwritten:
        raise refuse(
            f"pipe={layout.sizes['pipe']} and {min(layout.blueprint.overwritten)} of {layout.blueprint.name}, whose "
            "new value is its gradient, as of the scales of fp8 matmuls",
            rule="a pipeline computes gradients of parameters only, so that such state would keep its initial value",
            fix="pipe=1, with fsdp or tensor in its place; or layers without flax.linen.fp8_ops",
        )


def _map_paths(paths: Set[str], change, keep, state: Tree, *others: Tree) -> Tree:
    def apply(keys, *leaves):
        return (change if format_path(keys) in paths else keep)(*leaves)

    return jax.tree_util.tree_map_with_path(apply, state, *others)


# Dtypes of sums of gradients.
#
# float16, bfloat16    float32: a sum of many gradients overflows float16, and stops growing in bfloat16
# float32, float64     unchanged


def accumulator_dtype(dtype: jnp.dtype) -> jnp.dtype:
    """Returns the dtype for sums of gradients of a parameter of this dtype."""
    return jnp.dtype(jnp.float32) if is_short(dtype) else jnp.dtype(dtype)


def is_short(dtype: jnp.dtype) -> bool:
    """Whether a dtype is floating point with fewer than 32 bits."""
    return jnp.issubdtype(dtype, jnp.floating) and jnp.finfo(dtype).bits < 32


def computes_dtype(jaxpr: Jaxpr, dtype: DTypeLike) -> bool:
    """Whether an equation computes an array of this dtype, also inside loops, branches and calls."""
    for eqn in jaxpr.eqns:
        if any(getattr(var.aval, "dtype", None) == dtype for var in eqn.outvars):
            return True
        if any(computes_dtype(inner, dtype) for inner in jaxprs_in_params(eqn.params)):
            return True
    return False


def multiply_by_count(gradients: Tree, count: jax.Array) -> Tree:
    """Multiplies gradients of a mean by `count`, which gives gradients of the sum, in the accumulator dtype."""
    return jax.tree.map(lambda x: x.astype(wide := accumulator_dtype(x.dtype)) * count.astype(wide), gradients)


def divide_by_count(gradients: Tree, count: jax.Array, like: Tree) -> Tree:
    """Divides gradients of a sum by `count`, and casts them to the dtypes of `like`."""
    denominator = nonzero_count(count)
    return jax.tree.map(lambda x, leaf: (x / denominator.astype(x.dtype)).astype(leaf.dtype), gradients, like)
