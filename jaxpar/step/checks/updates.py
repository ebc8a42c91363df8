"""Checks the results of a user's optimizer: one update per parameter, and a state of unchanged structure."""

from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.sharding.names import Tree

CHAIN = "an optax chain makes updates of gradients while it is traced; its rate is a number, or a function of the step"
TRACED = "the line that this names; in a schedule jnp.where in the place of if, and one number as a rate"


def check_update(updates: Tree, new_state: Any, *, params: Tree, old_state: Any) -> None:
    """Refuses updates that cannot be added to the parameters, and a state that the next step cannot take.

    Args:
      updates: The updates that the optimizer returned.
      new_state: The state that it returned.
      params: The parameters.
      old_state: The state passed to it.

    Raises:
      JaxparError: Names the first parameter whose update has another shape, or the first array of the state that is
        new, missing, or has another shape or dtype.
    """
    shapes, target = ({path: shape for path, (shape, _) in _arrays(tree).items()} for tree in (updates, params))
    if missing := [path for path in target if path not in shapes]:
        raise refuse(
            f"the optimizer makes no update of params{missing[0]}",
            rule="an optimizer makes one update for each parameter, of its shape",
            fix="jnp.zeros_like of a parameter that it leaves alone, or freeze= for what is not trained",
        )
    for path, shape in shapes.items():
        if shape != target.get(path):
            text = f"the parameter is of {list(target[path])}" if path in target else "there is no such parameter"
            raise refuse(
                f"the optimizer's update of params{path} is of shape {list(shape)}, {text}",
                rule="an optimizer makes one update for each parameter, of its shape",
                fix="jax.tree.map(..., gradients) in its update",
            )
    before, after = _arrays(old_state), _arrays(new_state)
    for path in (*before, *(path for path in after if path not in before)):
        if before.get(path) != after.get(path):
            old_text, new_text = (_said(arrays.get(path)) for arrays in (before, after))
            raise refuse(
                f"the optimizer's state{path} is {old_text} before an update and {new_text} after it",
                rule="an optimizer's state keeps its arrays, their shapes and dtypes: a compiled step cannot grow it",
                fix="make it in its init as its update returns it",
            )


def _arrays(tree: Any) -> dict[str, tuple]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): (leaf.shape, leaf.dtype) for keys, leaf in leaves if hasattr(leaf, "shape")}


def _said(array: tuple | None) -> str:
    return "not there" if array is None else f"{array[1]}{list(array[0])}"
