"""Numbers of a state that were set by hand become arrays where the step wants them.

    state.optimizer.hyperparams["learning_rate"] = 0.01       a float, a numpy number, an array on any one device

optax documents this way to change a rate. Only scalars are placed: an array with dims that lies elsewhere is of another
layout, and refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.step.state import State


def with_placed_numbers(state: State, expected: State, placed: State) -> State:
    """Returns the state with every scalar in the dtype and on the devices of the step; itself if all of them are.

    Args:
      state: As given.
      expected: The step's, as shapes and dtypes.
      placed: Where its arrays are.
    """
    if jax.tree.structure(state) != jax.tree.structure(expected):
        return state
    made = jax.tree.map(_placed, state, expected, placed)
    same = all(a is b for a, b in zip(jax.tree.leaves(made), jax.tree.leaves(state), strict=True))
    return state if same else made


def with_arrays_for_numbers(state: State) -> State:
    """Returns the state with an array, on the devices of its count of steps, in place of every number that is none."""
    place = state.step.sharding

    def one(leaf: Any) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        number = np.asarray(leaf)
        return jax.device_put(number.astype(jax.dtypes.canonicalize_dtype(number.dtype)), place)

    return jax.tree.map(one, state)


def _placed(leaf: Any, want: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> Any:
    if want.shape or np.shape(leaf) or jnp.issubdtype(want.dtype, jax.dtypes.extended):
        return leaf
    if isinstance(leaf, jax.Array):
        if leaf.dtype == want.dtype and leaf.sharding.is_equivalent_to(place, 0):
            return leaf
        if leaf.is_deleted() or not (leaf.is_fully_addressable or leaf.is_fully_replicated):
            return leaf
        if jnp.issubdtype(leaf.dtype, jax.dtypes.extended):
            return leaf
    number = np.asarray(leaf)
    return jax.device_put(number.astype(want.dtype), place) if _fits(number, want.dtype) else leaf


def _fits(number: np.ndarray, dtype: Any) -> bool:
    """Returns whether a number may be of that dtype: rates may be whole numbers, counts are no fractions."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.issubdtype(number.dtype, jnp.floating) or number.dtype.kind in "biu"
    if jnp.issubdtype(dtype, jnp.integer):
        return number.dtype.kind in "iu" and jnp.iinfo(dtype).min <= int(number) <= jnp.iinfo(dtype).max
    return number.dtype == dtype
