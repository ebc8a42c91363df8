"""Checks the results of a user's optimizer: one update per parameter, and a state of unchanged structure."""

import warnings
from collections.abc import Callable
from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.parallel.layout import Layout
from jaxpar.parallel.place_arrays import place_arrays
from jaxpar.sharding.infer_names.infer_dims import with_program
from jaxpar.sharding.names import LARGE, Tree

CHAIN = "an optax chain makes updates of gradients while it is traced; its rate is a number, or a function of the step"
TRACE_FIX = "the line that this names; in a schedule jnp.where in the place of if, and one number as a rate"


def check_update(updates: Tree, new_state: Tree, *, params: Tree, old_state: Tree) -> None:
    """Refuses updates that do not fit the parameters, and an optimizer state that does not fit the next step.

    Args:
      updates: The updates that the optimizer returned.
      new_state: The state that it returned.
      params: The parameters.
      old_state: The state passed to it.

    Raises:
      JaxparError: If an update has another shape than its parameter, or an array of the state is new, missing, or has
        another shape or dtype; the message names the first.
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
            old_text, new_text = (_describe(arrays.get(path)) for arrays in (before, after))
            raise refuse(
                f"the optimizer's state{path} is {old_text} before an update and {new_text} after it",
                rule="an optimizer's state keeps its arrays, their shapes and dtypes: a compiled step cannot grow it",
                fix="make it in its init as its update returns it",
            )


def _arrays(tree: Tree) -> dict[str, tuple]:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(keys): (leaf.shape, leaf.dtype) for keys, leaf in leaves if hasattr(leaf, "shape")}


def _describe(array: tuple | None) -> str:
    return "not there" if array is None else f"{array[1]}{list(array[0])}"


# Warns when the first batch shows that a guessed dim name was wrong.
#
# The layout of an NNX model that is given only by its factory is made before there is a batch, so `tensor` splits its
# parameters by paths and shapes. The first batch shows how the model uses them.


def check_dims(layout: Layout, call: Callable[[Any], Any]) -> None:
    """Warns if the model's use of large parameters contradicts the guessed names by which the layout shards them.

    It does not warn if both shard the same dims but only one gathers the parameter before use: a device then sends
    either a sum of activations or the parameter, and either may be smaller (for the classifier of ViT-L: the sum).

    Args:
      layout: The layout with guessed names of dims.
      call: Calls a model as the step does: its loss, on a batch of zeros.
    """
    blueprint = layout.blueprint
    guessed = [
        path for path, place in layout.placements.items() if place.leaf.names is None and place.leaf.bytes >= LARGE
    ]
    if blueprint.program is not None or not guessed:
        return
    traced, _ = place_arrays(layout.parallel, with_program(blueprint, call), layout.mesh)
    wrong = [path for path in guessed if traced.placements[path].whole != layout.placements[path].whole]
    if wrong:
        path = max(wrong, key=lambda path: layout.placements[path].leaf.bytes)
        more = f"; so are {len(wrong) - 1} more of {len(guessed)}" * (len(wrong) > 1)
        warnings.warn(
            f"{blueprint.name}: {path} is placed as {layout.describe(path)} ({layout.placements[path].why}), but the "
            f"model's use of it suggests {traced.describe(path)} ({traced.placements[path].why}){more}\n"
            f'  fix: jp.compose(jp.from_nnx({blueprint.name}, batch["inputs"]), ...), or paths in jp.Parallel',
            stacklevel=4,
        )
