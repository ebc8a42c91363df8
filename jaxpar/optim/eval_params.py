"""The parameters that a run is judged by, where they are not those that it trains: an optimizer's state says so.

    state of the chain        parameter             is evaluated, sampled and exported as
    ScheduleFreeState         y                     (y - (1 - b1) z) / b1     z of the state
    EmaParamsState            w                     ema_params of the state
    any other                 w                     w

A state is known by the names of its fields, wherever it stands in a chain, so that what a checkpoint holds, which is
arrays by path, is read by the same rule. Parameters that a mask leaves out of it are judged as they are.

To add one: a row of `KINDS`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from jaxpar.errors import refuse

Tree = Any  # a nested dict of arrays, or of what stands for them


class EmaParamsState(NamedTuple):
    """State of `ema_params`: how many updates it has seen, and the average of the parameters after each of them."""

    ema_count: jax.Array
    ema_params: Tree


@dataclass(frozen=True, slots=True)
class Kind:
    """A kind of optimizer state that says what is evaluated.

    Attributes:
      fields: Those of its fields that hold one number each; together with `copy` they tell it from others.
      copy: The field that holds an array for each parameter.
      of: (fields, parameter, its array) to the parameter that is evaluated.
    """

    fields: tuple[str, ...]
    copy: str
    of: Callable[[Mapping[str, Any], Any, Any], Any]


def _schedule_free(fields: Mapping[str, Any], trained: Any, z: Any) -> Any:
    state = optax.contrib.ScheduleFreeState(**fields, z=z, base_optimizer_state=())
    return optax.contrib.schedule_free_eval_params(state, trained)


KINDS = (
    Kind(("b1", "weight_sum", "step_count", "max_lr"), "z", _schedule_free),
    Kind(("ema_count",), "ema_params", lambda fields, trained, mean: mean),
)


@dataclass(frozen=True, slots=True)
class Copy:
    """What a parameter is evaluated as follows from.

    Attributes:
      kind: How.
      path: Of its array in the optimizer's state.
      fields: Field of the state to the path of its number.
    """

    kind: Kind
    path: str
    fields: Mapping[str, str]

    def of(self, held: Mapping[str, Any], trained: Any) -> Any:
        """Returns the parameter that is evaluated, in the dtype of the one that is trained.

        Args:
          held: Arrays of the optimizer's state by path. Where replicas differ, numbers are [replica], as all has that
            dim first.
          trained: The parameter as it is trained.
        """
        numbers = {name: held[path] for name, path in self.fields.items()}
        wide = {name: x.reshape(*x.shape, *(1,) * (trained.ndim - x.ndim)) for name, x in numbers.items()}
        return self.kind.of(wide, trained, held[self.path]).astype(trained.dtype)


def copies(names: Iterable[str]) -> dict[str, Copy]:
    """Returns for each parameter that is evaluated as another what that follows from, by the parameter's path.

    Args:
      names: The paths of all arrays of an optimizer's state.

    Raises:
      JaxparError: If two states of a chain say what one parameter is evaluated as.
    """
    known = frozenset(names)
    found: dict[str, Copy] = {}
    for name in sorted(known):
        if (made := _copy(name, known)) is None:
            continue
        path, copy = made
        if path in found:
            raise refuse(
                f"{path} is evaluated as {found[path].path} of the optimizer's state says, and as {name} does",
                rule="of a chain at most one part says what a parameter is evaluated as",
                fix="schedule_free or ema_params, and one of them",
            )
        found[path] = copy
    return found


def _copy(name: str, known: frozenset[str]) -> tuple[str, Copy] | None:
    """Returns the path of the parameter that an array of a state is the copy of, and the copy; None for others."""
    words = name.split("/")
    for at, word in enumerate(words[:-1]):
        for kind in (kind for kind in KINDS if word == kind.copy):
            fields = {field: "/".join([*words[:at], field]) for field in kind.fields}
            if known.issuperset(fields.values()):
                return "/".join(words[at + 1 :]), Copy(kind, name, fields)
    return None


def held_for(optimizer: Any) -> dict[str, Any]:
    """Returns the arrays of an optimizer's state that say what is evaluated, by path; none with most optimizers."""
    return holding(optimizer)(optimizer)


def holding(optimizer: Any) -> Callable[[Any], dict[str, Any]]:
    """Returns `held_for` of one kind of state, whose paths are read once: an evaluation asks for them at each batch.

    Args:
      optimizer: A state of the chain, or its shapes.
    """
    names = [_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(optimizer)]
    wanted = {path for each in copies(names).values() for path in (each.path, *each.fields.values())}
    numbers = {path: number for number, path in enumerate(names) if path in wanted}
    tree = jax.tree.structure(optimizer)

    def held(state: Any) -> dict[str, Any]:
        leaves, own = jax.tree.flatten(state)
        if own != tree:  # of another chain: who is given it says so
            return held_for(state)
        return {path: leaves[number] for path, number in numbers.items()}

    return held


def eval_params(optimizer: Any, params: Tree) -> Tree:
    """Returns the parameters that a run is evaluated, sampled and exported with.

    Args:
      optimizer: The state of its optax chain, or of that what `held_for` returns.
      params: The parameters that it trains: these themselves, unless the chain says otherwise.
    """
    held = _by_path(optimizer)
    found = copies(held)

    def one(keys: Any, trained: Any) -> Any:
        copy = found.get(_path(keys))
        return trained if copy is None else copy.of(held, trained)

    return jax.tree_util.tree_map_with_path(one, params) if found else params


def ema_params(decay: float) -> optax.GradientTransformation:
    """Returns a transformation that changes no update, and keeps an average of the parameters, which is evaluated.

    It is the last of a chain: `optax.chain(optax.adamw(3e-4), ema_params(0.999))`.

    Args:
      decay: The share of the average that stays at each update. As `optax.ema` does it, the average is over the updates
        made so far, and the first parameters are not in it. It is kept in float32, or wider.

    Raises:
      JaxparError: If the decay is none.
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        rule = "a decay is a number from 0 to below 1"
        raise refuse(f"ema_params({decay!r:.60})", rule=rule, fix="ema_params(0.999)")

    log = math.log(decay) if decay else -math.inf

    def init(params: Tree) -> EmaParamsState:
        # a copy, so that it can be donated beside them
        mean = jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True), params)
        return EmaParamsState(ema_count=jnp.zeros((), jnp.int32), ema_params=mean)

    def update(updates: Tree, state: Any, params: Any = None) -> tuple[Tree, Any]:
        if params is None:
            raise refuse("ema_params without parameters", rule="it averages them", fix="update(updates, state, params)")
        count = jnp.asarray(optax.safe_increment(state.ema_count))
        # 1 - decay^count by way of the logarithm: in float32 a decay near 1 is 1, and its powers have few digits left
        share = (decay - 1) / jnp.expm1(count.astype(jnp.float32) * log)

        def one(mean: jax.Array, new: jax.Array) -> jax.Array:
            return mean + share.astype(mean.dtype) * (new.astype(mean.dtype) - mean)

        mean = jax.tree.map(one, state.ema_params, optax.apply_updates(params, updates))
        return updates, EmaParamsState(ema_count=count, ema_params=mean)

    return optax.GradientTransformation(init, update)


def _by_path(tree: Any) -> dict[str, Any]:
    return {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path(keys: Any) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
