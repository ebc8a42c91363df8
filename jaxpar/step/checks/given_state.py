"""The state that a step is given: it is there still, and of the step's own layout, model and optimizer."""

from typing import Any

import jax

from jaxpar.errors import refuse
from jaxpar.sharding.names import path_of
from jaxpar.step.state import State

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


def _check_leaf(path: str, leaf: Any, want: jax.ShapeDtypeStruct, place: jax.sharding.Sharding, whose: str) -> None:
    if not isinstance(leaf, jax.Array):
        raise refuse(
            f"{path} of the state is a {type(leaf).__name__}",
            rule="a state lives on the devices of its layout",
            fix=_FIX,
        )
    if leaf.shape != want.shape:
        raise refuse(
            f"{path} of the state is {list(leaf.shape)}, the step's is {list(want.shape)}",
            rule=f"state and step have the same {whose}",
            fix=_FIX,
        )
    if not leaf.sharding.is_equivalent_to(place, leaf.ndim):
        raise refuse(
            f"a state of another layout: {path} is on {leaf.sharding}, the step wants {place}"[:300],
            rule="state and step have the same layout, and the same offload",
            fix=_FIX,
        )
