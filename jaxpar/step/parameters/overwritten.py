"""Model state whose new value is its gradient: the scales and maxima of Flax's fp8 matmuls (`flax.linen.fp8_ops`).

    state ─► every microbatch, from the same state ─► gradients of its mean loss by the state ─► their maximum

The backward pass of such a matmul returns the largest output gradient as a gradient, the only output that a backward
pass has. Microbatches are combined by the maximum, like two uses in one program by Flax's dtype `fm32`.
"""

from collections.abc import Set

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, path_of


def select_paths(paths: Set[str], state: Tree) -> Tree:
    """Returns the model state with None at all other paths."""
    return _mapped(paths, lambda leaf: leaf, lambda _: None, state)


def replace_paths(paths: Set[str], state: Tree, other: Tree) -> Tree:
    """Returns the model state with the arrays of `other` at these paths."""
    return _mapped(paths, lambda _, new: new, lambda old, _: old, state, other)


def fill_minus_infinity(paths: Set[str], state: Tree) -> Tree:
    """Returns the model state with minus infinity at these paths, the identity of the maximum."""
    return _mapped(paths, lambda leaf: jnp.full_like(leaf, -jnp.inf), lambda leaf: leaf, state)


def maximum_at_paths(paths: Set[str], state: Tree, after: Tree) -> Tree:
    """Returns the model state after a microbatch, with the maximum of both at these paths."""
    return _mapped(paths, jnp.maximum, lambda _, new: new, state, after)


def check_overwritten(layout: Layout) -> None:
    """Refuses a pipeline whose model has such state.

    Raises:
      JaxparError: If it has any.
    """
    if layout.blueprint.overwritten:
        raise refuse(
            f"pipe={layout.sizes['pipe']} and {min(layout.blueprint.overwritten)} of {layout.blueprint.name}, whose "
            "new value is its gradient, as of the scales of fp8 matmuls",
            rule="a pipeline computes gradients of parameters only, so that such state would keep its initial value",
            fix="pipe=1, with fsdp or tensor in its place; or layers without flax.linen.fp8_ops",
        )


def _mapped(paths: Set[str], inside, outside, state: Tree, *others: Tree) -> Tree:
    def one(keys, *leaves):
        return (inside if path_of(keys) in paths else outside)(*leaves)

    return jax.tree_util.tree_map_with_path(one, state, *others)
