"""Slots: buffers of a stage with a leading dim, of which a row of the table names one to read or to write."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def load(tree: Tree, index: Any) -> Tree:
    """Returns the values in one slot of each buffer; a slot of -1 reads slot 0, for an op whose result is dropped."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jnp.maximum(index, 0), 0, keepdims=False), tree)


def store(tree: Tree, new: Tree, index: Any, take: Any) -> Tree:
    """Returns the buffers with one slot written, where `take` holds."""
    index = jnp.maximum(index, 0)

    def one(buffer, value):
        # the choice is made on one slot: a `where` over the whole buffer would rewrite every slot in every tick
        old = jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(take, value, old), index, 0)

    return jax.tree.map(one, tree, new)
