"""What an optimizer of the user's own returns: an update for each parameter, and a state like the one before."""

from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.sharding.names import Tree

CHAIN = "an optax chain makes updates of gradients while it is traced; its rate is a number, or a function of the step"
TRACED = "the line that this names; in a schedule jnp.where in the place of if, and one number as a rate"


def check_update(updates: Tree, kept: Any, *, params: Tree, held: Any) -> None:
    """Refuses what cannot be added to parameters, or cannot be the state of the next step.

    Args:
      updates: As the optimizer returned them.
      kept: The state that it returned.
      params: The parameters.
      held: The state that it was given.

    Raises:
      JaxparError: With the first parameter whose update has another shape, or the first array of the state that is new,
        gone, or of another shape or dtype.
    """
    shapes, wanted = ({path: shape for path, (shape, _) in _arrays(tree).items()} for tree in (updates, params))
    if without := [path for path in wanted if path not in shapes]:
        raise refuse(
            f"the optimizer makes no update of params{without[0]}",
            rule="an optimizer makes one update for each parameter, of its shape",
            fix="jnp.zeros_like of a parameter that it leaves alone, or freeze= for what is not trained",
        )
    for path, shape in shapes.items():
        if shape != wanted.get(path):
            of = f"the parameter is of {list(wanted[path])}" if path in wanted else "there is no such parameter"
            raise refuse(
                f"the optimizer's update of params{path} is of shape {list(shape)}, {of}",
                rule="an optimizer makes one update for each parameter, of its shape",
                fix="jax.tree.map(..., gradients) in its update",
            )
    before, after = _arrays(held), _arrays(kept)
    for path in (*before, *(path for path in after if path not in before)):
        if before.get(path) != after.get(path):
            was, now = (_said(arrays.get(path)) for arrays in (before, after))
            raise refuse(
                f"the optimizer's state{path} is {was} before an update and {now} after it",
                rule="an optimizer's state keeps its arrays, their shapes and dtypes: a compiled step cannot grow it",
                fix="make it in its init as its update returns it",
            )


def _arrays(tree: Any) -> dict[str, tuple]:
    """Returns shape and dtype of each array by its path."""
    found = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): (leaf.shape, leaf.dtype) for keys, leaf in found if hasattr(leaf, "shape")}


def _said(array: tuple | None) -> str:
    return "not there" if array is None else f"{array[1]}{list(array[0])}"
