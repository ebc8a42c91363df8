"""Checks the input state of a step, and the model state that it returns.

The input must not be donated already, and must match the step's layout, model and optimizer; model state keeps its
shape and dtype.
"""

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.core import Tracer
from jax.sharding import PartitionSpec
from jax.typing import ArrayLike, DTypeLike

from jaxpar.errors import JaxparError, refuse
from jaxpar.exchange.base import MEAN, NO_MODEL, Exchange
from jaxpar.optim.eval_params import eval_arrays
from jaxpar.parallel.layout import Layout
from jaxpar.sharding.names import Tree, format_path, leaves_by_path
from jaxpar.step.state import HOST, State

_FIX = "state = jp.init_state(layout, optimizer), then state, metrics = step(state, batch)"


@dataclass(frozen=True, slots=True)
class Owner:
    """The value that a state must match, as messages name it, and the fix if it does not."""

    name: str
    fix: str


STEP = Owner("step", _FIX)


def check_not_donated(state: object) -> None:
    """Refuses a donated State (a deleted array kills the process in jax 0.10.2), and any value that is not a State.

    Raises:
      JaxparError: If it is donated, or not a State.
    """
    if not isinstance(state, State):
        raise refuse(
            f"a state that is a {type(state).__name__}",
            rule="a state comes from jp.init_state, or from the step before",
            fix=_FIX,
        )
    if isinstance(state.step, Tracer):
        raise refuse(
            "a step inside of jax.jit, or of another transformation of JAX",
            rule="a step is one compiled program, whose input is arrays",
            fix="state, metrics = step(state, batch) in a loop of Python, without jax.jit; or jp.fit(step, data, "
            "steps=100)",
        )
    if isinstance(state.step, jax.Array) and state.step.is_deleted():
        raise refuse(
            "a state that was already passed to a step",
            rule="a step reuses the memory of the state it is given",
            fix="state, metrics = step(state, batch), and only the new state after that",
        )


def check_matches_step(state: State, expected: State, placed: State) -> None:
    """Refuses a state of another layout, model or optimizer.

    Args:
      state: The input state.
      expected: Shapes and dtypes of the step's state.
      placed: Shardings of the step's state.

    Raises:
      JaxparError: Names the first array with another shape, dtype or sharding.
    """
    for part, whose in (
        ("params", "model"),
        ("optimizer", "optimizer"),
        ("model_state", "model"),
        ("exchange", "exchange"),
    ):
        tree, expected_tree = getattr(state, part), getattr(expected, part)
        if jax.tree.structure(tree) != jax.tree.structure(expected_tree):
            raise refuse(
                f"a state of another {whose}: its tree of {part} is another",
                rule=f"state and step have the same {whose}",
                fix=_FIX,
            )
        flat = zip(
            jax.tree_util.tree_leaves_with_path(tree),
            jax.tree.leaves(expected_tree),
            jax.tree.leaves(getattr(placed, part)),
            strict=True,
        )
        for (keys, leaf), want, place in flat:
            _check_leaf(f"{part}/{format_path(keys)}", leaf, want, place, whose)


def check_matches_layout(state: State, layout: Layout) -> None:
    """Refuses a state whose parameters or model state are of another layout or model; ignores the optimizer's state.

    Raises:
      JaxparError: Names the first array that is missing, or that has another shape, dtype or sharding.
    """
    exchange = layout.parallel.exchange
    count = exchange.count(layout.sizes["data"])
    owner = Owner("layout", "the layout that the state was made with: jp.model(step.layout, state)")
    for part, places, has_replicas in (
        ("params", layout.placements, exchange.replicas_differ),
        ("model_state", layout.other_state, exchange.per_replica),
    ):
        leaves = leaves_by_path(getattr(state, part))
        if paths := sorted(leaves.keys() ^ places.keys()):
            raise refuse(
                f"a state of another model: {part}/{paths[0]} is in the {'state' if paths[0] in leaves else 'layout'} "
                "alone",
                rule="state and layout have the same model",
                fix=owner.fix,
            )
        for path, leaf in leaves.items():
            shape, spec = places[path].leaf.shape, places[path].stored
            if has_replicas:
                shape, spec = (count, *shape), PartitionSpec("data", *spec)
            want = jax.ShapeDtypeStruct(shape, places[path].leaf.dtype)
            _check_leaf(f"{part}/{path}", leaf, want, layout.sharding(spec), "model", owner)
    model = exchange.global_model
    if exchange.replicas_differ and model not in (MEAN, NO_MODEL) and model not in state.exchange:
        raise refuse(
            f"a state of another exchange: it has no {model}, which {exchange.name} evaluates",
            rule="state and layout have the same exchange",
            fix=owner.fix,
        )


def cast_to_initial(name: str, before: Tree, after: Tree) -> Tree:
    """Casts the model state after a call to its initial dtypes.

    Args:
      name: The name of the model.
      before: The model state before the call.
      after: The model state after it.

    Raises:
      JaxparError: Names the first array with another shape, or a dtype that cannot be cast to the initial one.
    """
    if jax.tree.structure(after) != jax.tree.structure(before):
        raise _tree_error(name, before, after)
    written, structure = jax.tree_util.tree_flatten_with_path(after)
    pairs = zip(written, jax.tree.leaves(before), strict=True)
    return jax.tree.unflatten(
        structure, [_cast_leaf(name, format_path(keys), x, initial) for (keys, x), initial in pairs]
    )


def _cast_leaf(name: str, path: str, written: ArrayLike, made: jax.Array) -> Any:
    if jnp.shape(written) != made.shape:
        raise refuse(
            f"{name} writes {path} of {list(jnp.shape(written))}, which was made as {list(made.shape)}",
            rule="state that lasts keeps its shape: a compiled step cannot grow it",
            fix="make it in the shape that is written, or return what only this call needs",
        )
    dtype = jnp.result_type(written)
    if dtype == made.dtype:
        return written
    if not _kind(dtype) <= _kind(made.dtype) < math.inf:
        raise refuse(
            f"{name} writes {path} in {dtype}, which was made in {made.dtype}",
            rule="state that lasts keeps its dtype: it takes numbers of any width, of its own kind or one within that",
            fix=f"make it in {dtype}, or cast where it is written: .astype({made.dtype})",
        )
    return jnp.asarray(written).astype(made.dtype)


def _kind(dtype: DTypeLike) -> float:
    """Ranks kinds of numbers; a kind can represent those of lower rank. The rank of other dtypes is inf."""
    kinds = (jnp.bool_, jnp.unsignedinteger, jnp.signedinteger, jnp.floating, jnp.complexfloating)
    return next((rank for rank, kind in enumerate(kinds) if jnp.issubdtype(dtype, kind)), math.inf)


def _tree_error(name: str, before: Tree, after: Tree) -> JaxparError:
    path_sets = (
        {format_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(tree)} for tree in (before, after)
    )
    before_paths, after_paths = path_sets
    where = ", ".join(sorted(before_paths ^ after_paths)[:3]) or "a container of another type"
    return refuse(
        f"{name} writes another tree of arrays to its state than it was made with: {where}",
        rule="state that lasts keeps its tree: a compiled step cannot grow it",
        fix="make in init the arrays that are written later, in the same containers",
    )


def _check_leaf(
    path: str, leaf: object, want: jax.ShapeDtypeStruct, place: jax.sharding.Sharding, whose: str, owner: Owner = STEP
) -> None:
    if not isinstance(leaf, jax.Array):
        raise refuse(
            f"{path} of the state is a {type(leaf).__name__}",
            rule="a state lives on the devices of its layout; a single number is put there",
            fix=f"a number of {want.dtype}" if not want.shape else "the array of the state before, x.at[...].set(...)",
        )
    if leaf.shape != want.shape:
        raise refuse(
            f"{path} of the state is {list(leaf.shape)}, the {owner.name}'s is {list(want.shape)}",
            rule=f"state and {owner.name} have the same {whose}",
            fix=owner.fix,
        )
    if leaf.dtype != want.dtype:
        raise refuse(
            f"{path} of the state is {leaf.dtype}, the {owner.name}'s is {want.dtype}",
            rule=f"state and {owner.name} have the same {whose}",
            fix=f"{path}.astype({str(want.dtype)!r})",
        )
    if not leaf.sharding.is_equivalent_to(place, leaf.ndim):
        on_host, offload = leaf.sharding.memory_kind == HOST, place.memory_kind == HOST
        if on_host != offload:
            where = "host memory" if on_host else "device memory"
            raise refuse(
                f"{path} of the state is in {where}, and the step was made with offload={offload}",
                rule="state and step have the same offload",
                fix=f"jp.init_state(layout, optimizer, offload={offload}), or offload={on_host} of the step",
            )
        raise refuse(
            f"a state of another layout: {path} is on {leaf.sharding}, the {owner.name} wants {place}"[:300],
            rule=f"state and {owner.name} have the same layout",
            fix=owner.fix,
        )


# Checks that a sync round of replicas also moves the parameters used for evaluation.


def check_eval_params(exchange: Exchange, optimizer: object) -> None:
    """Refuses an optimizer whose state defines the parameters to evaluate, if sync rounds leave this state unchanged.

    Args:
      exchange: The exchange between replicas.
      optimizer: The state of the optimizer's chain, as shapes.

    Raises:
      JaxparError: If a sync round changes the parameters but not the optimizer state.
    """
    if not exchange.leaves_optimizers or not (opt_state := eval_arrays(optimizer)):
        return
    raise refuse(
        f"an optimizer whose state determines the evaluated parameters (optimizer/{next(iter(opt_state))}) with "
        f"exchange {exchange}",
        rule="the evaluated parameters are computed from parameters and optimizer state, and here a sync round of "
        "replicas moves the parameters alone",
        fix='jp.Exchange("local", optimizer="averaged"), which moves both; or another optimizer',
    )


# Places scalars that the user assigned to a state.
#
#     state.optimizer.hyperparams["learning_rate"] = 0.01       a float, a numpy scalar, or an array on any device
#
# optax documents this way to change a learning rate. Only scalars are placed: a non-scalar array with another sharding
# comes from another layout, and is refused.


def place_scalars(state: State, expected: State, placed: State) -> State:
    """Casts every scalar of the state to the step's dtype and places it on the step's devices, if needed.

    Args:
      state: The input state.
      expected: Shapes and dtypes of the step's state.
      placed: Shardings of the step's state.
    """
    if jax.tree.structure(state) != jax.tree.structure(expected):
        return state
    result = jax.tree.map(_place_leaf, state, expected, placed)
    unchanged = all(a is b for a, b in zip(jax.tree.leaves(result), jax.tree.leaves(state), strict=True))
    return state if unchanged else result


def scalars_to_arrays(state: State) -> State:
    """Replaces Python and numpy numbers by arrays on the devices of `state.step`."""
    place = state.step.sharding

    def place_number(leaf: ArrayLike) -> jax.Array:
        if isinstance(leaf, jax.Array):
            return leaf
        number = np.asarray(leaf)
        return jax.device_put(number.astype(jax.dtypes.canonicalize_dtype(number.dtype)), place)

    return jax.tree.map(place_number, state)


def _place_leaf(leaf: ArrayLike, want: jax.ShapeDtypeStruct, place: jax.sharding.Sharding) -> Any:
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


def _fits(number: np.ndarray, dtype: DTypeLike) -> bool:
    """Whether a number can be cast to a dtype: integers fit floats, but fractions do not fit integers."""
    if jnp.issubdtype(dtype, jnp.floating):
        return jnp.issubdtype(number.dtype, jnp.floating) or number.dtype.kind in "biu"
    if jnp.issubdtype(dtype, jnp.integer):
        return number.dtype.kind in "iu" and jnp.iinfo(dtype).min <= int(number) <= jnp.iinfo(dtype).max
    return number.dtype == dtype
