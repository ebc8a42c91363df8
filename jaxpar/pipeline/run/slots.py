"""Slots: entries of dim 0 of a stage's buffers; a row of the table has the numbers of slots to read and to write."""

from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


def load(tree: Tree, index: jax.Array | int) -> Tree:
    """Reads one slot of each buffer; index -1 reads slot 0, for an op whose result is dropped."""
    return jax.tree.map(lambda leaf: jax.lax.dynamic_index_in_dim(leaf, jnp.maximum(index, 0), 0, keepdims=False), tree)


def store(tree: Tree, new: Tree, index: jax.Array | int, take: jax.Array | bool) -> Tree:
    """Writes one slot of each buffer if `take` is true."""
    index = jnp.maximum(index, 0)

    def one(buffer, value):
        # selects on one slot: a `where` over the whole buffer would rewrite every slot in every tick
        old = jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(take, value, old), index, 0)

    return jax.tree.map(one, tree, new)
