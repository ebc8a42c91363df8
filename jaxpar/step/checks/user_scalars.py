"""Places scalars that the user assigned to a state.

    state.optimizer.hyperparams["learning_rate"] = 0.01       a float, a numpy scalar, or an array on any device

optax documents this way to change a learning rate. Only scalars are placed: a non-scalar array with another sharding
comes from another layout, and is refused.
"""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxpar.step.state import State


def place_scalars(state: State, expected: State, placed: State) -> State:
    """Returns the state with every scalar in the step's dtype and on its devices; unchanged if all already are.

    Args:
      state: The input state.
      expected: Shapes and dtypes of the step's state.
      placed: Shardings of the step's state.
    """
    if jax.tree.structure(state) != jax.tree.structure(expected):
        return state
    result = jax.tree.map(_placed, state, expected, placed)
    unchanged = all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(state), strict=True))
    return state if unchanged else result


def scalars_to_arrays(state: State) -> State:
    """Replaces Python and numpy numbers by arrays on the devices of `state.step`."""
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
    """Whether a number can be cast to a dtype: integers fit floats, but fractions do not fit integers."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.issubdtype(number.dtype, jnp.floating) or number.dtype.kind in "biu"
    if jnp.issubdtype(dtype, jnp.integer):
        return number.dtype.kind in "iu" and jnp.iinfo(dtype).min <= int(number) <= jnp.iinfo(dtype).max
    return number.dtype == dtype
