"""The state that a step is given, and hands on.

It is there still, and of the step's own layout, model and optimizer; what the model keeps in it keeps its shape.
"""

from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.sharding.names import Tree, path_of
from jaxpar.step.state import HOST, State

_FIX = "state = jp.init_state(layout, optimizer), then state, metrics = step(state, batch)"


def check_there(state: Any) -> None:
    """Refuses what is no state, or was given up; jax 0.10.2 ends the process where a program gets a deleted array.

    Raises:
      JaxparError: If it is either.
    """
    if not isinstance(state, State):
        raise refuse(
            f"a state that is a {type(state).__name__}",
            rule="a state comes from jp.init_state, or from the step before",
            fix=_FIX,
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise refuse(
            "a state that an earlier step took over",
            rule="a step reuses the memory of the state it is given",
            fix="state, metrics = step(state, batch), and only the new state after that",
        )


def check_same(state: State, expected: State, placed: State) -> None:
    """Refuses a state of another layout, model or optimizer.

    Args:
      state: As given.
      expected: The step's, as shapes and dtypes.
      placed: Where its arrays are.

    Raises:
      JaxparError: With the first array that is another, or elsewhere.
    """
    for part, whose in (
        ("params", "model"),
        ("optimizer", "optimizer"),
        ("model_state", "model"),
        ("exchange", "exchange"),
    ):
        given, wanted = getattr(state, part), getattr(expected, part)
        if jax.tree.structure(given) != jax.tree.structure(wanted):
            raise refuse(
                f"a state of another {whose}: its tree of {part} is another",
                rule=f"state and step have the same {whose}",
                fix=_FIX,
            )
        flat = zip(
            jax.tree_util.tree_leaves_with_path(given),
            jax.tree.leaves(wanted),
            jax.tree.leaves(getattr(placed, part)),
            strict=True,
        )
        for (keys, leaf), want, place in flat:
            _check_leaf(f"{part}/{path_of(keys)}", leaf, want, place, whose)


def check_kept(name: str, before: Tree, after: Tree) -> None:
    """Refuses a model that writes arrays of other shapes to its state.

    Args:
      name: The name of the model.
      before: The state of the model before a call.
      after: What the call made of it.

    Raises:
      JaxparError: With the first array that has another shape.
    """
    for (keys, kept), held in zip(jax.tree_util.tree_leaves_with_path(after), jax.tree.leaves(before), strict=True):
        if kept.shape != held.shape:
            raise refuse(
                f"{name} writes {path_of(keys)} of {list(kept.shape)}, which was made as {list(held.shape)}",
                rule="state that lasts keeps its shape: a compiled step cannot grow it",
                fix="make it in the shape that is written, or return what only this call needs",
            )


def _check_leaf(path: str, leaf: Any, want: jax.ShapeDtypeStruct, place: jax.sharding.Sharding, whose: str) -> None:
    if not isinstance(leaf, jax.Array):
        raise refuse(
            f"{path} of the state is a {type(leaf).__name__}",
            rule="a state lives on the devices of its layout; a single number is put there",
            fix=f"a number of {want.dtype}" if not want.shape else "the array of the state before, x.at[...].set(...)",
        )
    if leaf.shape != want.shape:
        raise refuse(
            f"{path} of the state is {list(leaf.shape)}, the step's is {list(want.shape)}",
            rule=f"state and step have the same {whose}",
            fix=_FIX,
        )
    if leaf.dtype != want.dtype:
        raise refuse(
            f"{path} of the state is {leaf.dtype}, the step's is {want.dtype}",
            rule=f"state and step have the same {whose}",
            fix=f"{path}.astype({str(want.dtype)!r})",
        )
    if not leaf.sharding.is_equivalent_to(place, leaf.ndim):
        held, wanted = leaf.sharding.memory_kind == HOST, place.memory_kind == HOST
        if held != wanted:
            where = "host memory" if held else "device memory"
            raise refuse(
                f"{path} of the state is in {where}, and the step was made with offload={wanted}",
                rule="state and step have the same offload",
                fix=f"jp.init_state(layout, optimizer, offload={wanted}), or offload={held} of the step",
            )
        raise refuse(
            f"a state of another layout: {path} is on {leaf.sharding}, the step wants {place}"[:300],
            rule="state and step have the same layout",
            fix=_FIX,
        )
