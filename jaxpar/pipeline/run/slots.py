"""Slots: entries of dim 0 of a stage's buffers; a row of the table has the numbers of slots to read and to write."""

from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

Tree = Any


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Interleaved:
    """Slots that lie along dim 1 of an array: with them along dim 0, rows of a batch would be copied.

    Attributes:
      rows: The slots. Shape [rows per slot, slots, ...].
    """

    rows: jax.Array


def _is_interleaved(leaf: object) -> bool:
    return isinstance(leaf, Interleaved)


def load(tree: Tree, index: jax.Array | int) -> Tree:
    """Reads one slot of each buffer; index -1 reads slot 0, for an op whose result is dropped."""
    index = jnp.maximum(index, 0)

    def load_leaf(leaf):
        array, dim = (leaf.rows, 1) if _is_interleaved(leaf) else (leaf, 0)
        return jax.lax.dynamic_index_in_dim(array, index, dim, keepdims=False)

    return jax.tree.map(load_leaf, tree, is_leaf=_is_interleaved)


def slot_shapes(tree: Tree) -> Tree:
    """Returns the shapes of one slot of each buffer."""
    return jax.eval_shape(lambda tree: load(tree, 0), tree)


def store(tree: Tree, new: Tree, index: jax.Array | int, mask: jax.Array | bool) -> Tree:
    """Writes one slot of each buffer if `mask` is true."""
    index = jnp.maximum(index, 0)

    def store_leaf(buffer, value):
        # selects on one slot: a `where` over the whole buffer would rewrite every slot in every tick
        old = jax.lax.dynamic_index_in_dim(buffer, index, 0, keepdims=False)
        return jax.lax.dynamic_update_index_in_dim(buffer, jnp.where(mask, value, old), index, 0)

    return jax.tree.map(store_leaf, tree, new)
