"""State whose new value is its gradient: the scales and maxima of Flax's fp8 matmuls (`flax.linen.fp8_ops`).

    state ─► each microbatch, from the same state ─► gradients of its mean loss by the state ─► the largest is the state

A matmul writes in its backward pass the largest output gradient that it met, where nothing but a gradient leaves a
backward pass. Microbatches are joined as Flax's dtype `fm32` joins two uses in one program: by the larger.
"""

from collections.abc import Set

import jax
import jax.numpy as jnp

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, path_of


def only(paths: Set[str], state: Tree) -> Tree:
    """Returns a model state with None everywhere but at these paths."""
    return _mapped(paths, lambda leaf: leaf, lambda _: None, state)


def replaced(paths: Set[str], state: Tree, other: Tree) -> Tree:
    """Returns a model state with the arrays of another at these paths."""
    return _mapped(paths, lambda _, new: new, lambda old, _: old, state, other)


def lowest(paths: Set[str], state: Tree) -> Tree:
    """Returns a model state with minus infinity at these paths: any number is larger."""
    return _mapped(paths, lambda leaf: jnp.full_like(leaf, -jnp.inf), lambda leaf: leaf, state)


def largest(paths: Set[str], state: Tree, after: Tree) -> Tree:
    """Returns the model state after a microbatch, with the larger of both at these paths."""
    return _mapped(paths, jnp.maximum, lambda _, new: new, state, after)


def check_overwritten(layout: Layout) -> None:
    """Refuses a pipeline of a model with such state.

    Raises:
      JaxparError: If it has any.
    """
    if layout.blueprint.overwritten:
        raise refuse(
            f"pipe={layout.sizes['pipe']} and {min(layout.blueprint.overwritten)} of {layout.blueprint.name}, whose "
            "new value is its gradient, as of the scales of fp8 matmuls",
            rule="a pipeline makes gradients of parameters alone, so that such state would stay as it was made",
            fix="pipe=1, with fsdp or tensor in its place; or layers without flax.linen.fp8_ops",
        )


def _mapped(paths: Set[str], inside, outside, state: Tree, *others: Tree) -> Tree:
    def one(keys, *leaves):
        return (inside if path_of(keys) in paths else outside)(*leaves)

    return jax.tree_util.tree_map_with_path(one, state, *others)
