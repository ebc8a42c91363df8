"""Computes the parameters to evaluate from the optimizer's state, if that defines others than the trained ones.

    state of the chain        parameter             is evaluated, sampled and exported as
    ScheduleFreeState         y                     (y - (1 - b1) z) / b1     z of the state
    EmaParamsState            w                     ema_params of the state
    any other                 w                     w

A state is recognized by the names of its fields, anywhere in a chain, so that the same rule applies to a checkpoint,
which holds arrays by path. A parameter that a mask excludes from this state is evaluated unchanged.

To add one: a row of `KINDS`.
"""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.tree_util import KeyPath

from jaxpar.errors import refuse

Tree = Any  # a nested dict of arrays, or of placeholders for them


class EmaParamsState(NamedTuple):
    """State of `ema_params`: the number of updates, and the average of the parameters after each of them."""

    ema_count: jax.Array
    ema_params: Tree


@dataclass(frozen=True, slots=True)
class StateKind:
    """A kind of optimizer state that defines the parameters to evaluate.

    Attributes:
      fields: Names of its scalar fields; together with `copy` they identify the kind.
      copy: Name of the field that holds one array per parameter.
      evaluate: Maps (scalar fields, trained parameter, its array in `copy`) to the parameter to evaluate.
    """

    fields: tuple[str, ...]
    copy: str
    evaluate: Callable[[Mapping[str, Any], Any, Any], Any]


def _schedule_free(fields: Mapping[str, Any], trained: jax.Array, z: jax.Array) -> Any:
    state = optax.contrib.ScheduleFreeState(**fields, z=z, base_optimizer_state=())
    return optax.contrib.schedule_free_eval_params(state, trained)


KINDS = (
    StateKind(("b1", "weight_sum", "step_count", "max_lr"), "z", _schedule_free),
    StateKind(("ema_count",), "ema_params", lambda fields, trained, mean: mean),
)


@dataclass(frozen=True, slots=True)
class EvalSource:
    """The part of the optimizer's state that gives the value of one parameter for evaluation.

    Attributes:
      kind: How the state defines the parameter: by schedule_free, or as an average over steps.
      path: Path of the parameter's array in the optimizer's state.
      fields: Path of each scalar field in the optimizer's state, by name.
    """

    kind: StateKind
    path: str
    fields: Mapping[str, str]

    def evaluate(self, opt_state_arrays: Mapping[str, Any], trained: jax.Array) -> Any:
        """Computes the parameter to evaluate, in the dtype of the trained one.

        Args:
          opt_state_arrays: Arrays of the optimizer's state by path. If replicas differ, scalars are [replica], and
            every other array has dim 0 for replicas.
          trained: The trained parameter.
        """
        numbers = {name: opt_state_arrays[path] for name, path in self.fields.items()}
        broadcast = {name: x.reshape(*x.shape, *(1,) * (trained.ndim - x.ndim)) for name, x in numbers.items()}
        return self.kind.evaluate(broadcast, trained, opt_state_arrays[self.path]).astype(trained.dtype)


def eval_sources(names: Iterable[str]) -> dict[str, EvalSource]:
    """Maps the path of each parameter that is evaluated differently to its `EvalSource`.

    Args:
      names: Paths of all arrays in an optimizer's state.

    Raises:
      JaxparError: If two states of a chain define the same parameter.
    """
    paths = frozenset(names)
    result: dict[str, EvalSource] = {}
    for name in sorted(paths):
        if (entry := _copy(name, paths)) is None:
            continue
        path, copy = entry
        if path in result:
            raise refuse(
                f"the optimizer's state defines the evaluated {path} twice: {result[path].path} and {name}",
                rule="at most one part of a chain defines the parameters to evaluate",
                fix="keep one of schedule_free and ema_params",
            )
        result[path] = copy
    return result


def _copy(name: str, paths: frozenset[str]) -> tuple[str, EvalSource] | None:
    """Maps the path of an array in the state to (path of its parameter, `EvalSource`), or None if it defines none."""
    words = name.split("/")
    for depth, word in enumerate(words[:-1]):
        for kind in (kind for kind in KINDS if word == kind.copy):
            fields = {field: "/".join([*words[:depth], field]) for field in kind.fields}
            if paths.issuperset(fields.values()):
                return "/".join(words[depth + 1 :]), EvalSource(kind, name, fields)
    return None


def eval_arrays(optimizer: object) -> dict[str, Any]:
    """Selects the arrays of an optimizer's state that define the parameters to evaluate; most optimizers have none."""
    return eval_arrays_reader(optimizer)(optimizer)


def eval_arrays_reader(optimizer: object) -> Callable[[Any], dict[str, Any]]:
    """Builds a faster `eval_arrays` for one structure of state: it looks for the paths only once.

    Args:
      optimizer: A state of the chain, or its shapes.
    """
    names = [_path(keys) for keys, _ in jax.tree_util.tree_leaves_with_path(optimizer)]
    needed_paths = {path for copy in eval_sources(names).values() for path in (copy.path, *copy.fields.values())}
    numbers = {path: number for number, path in enumerate(names) if path in needed_paths}
    tree = jax.tree.structure(optimizer)

    def read_arrays(state: Tree) -> dict[str, Any]:
        leaves, structure = jax.tree.flatten(state)
        if structure != tree:  # state of another chain: the caller raises an error
            return eval_arrays(state)
        return {path: leaves[number] for path, number in numbers.items()}

    return read_arrays


def eval_params(optimizer: Any, params: Tree) -> Tree:
    """Computes the parameters to evaluate, sample and export.

    Args:
      optimizer: The state of its optax chain, or the result of `eval_arrays` on it.
      params: The trained parameters; returned unchanged unless the chain defines others.
    """
    arrays = _by_path(optimizer)
    copies_by_path = eval_sources(arrays)

    def one(keys: KeyPath, trained: Any) -> Any:
        copy = copies_by_path.get(_path(keys))
        return trained if copy is None else copy.evaluate(arrays, trained)

    return jax.tree_util.tree_map_with_path(one, params) if copies_by_path else params


def ema_params(decay: float) -> optax.GradientTransformation:
    """A transformation that leaves updates unchanged and averages the parameters; the average is evaluated.

    It goes last in a chain: `optax.chain(optax.adamw(3e-4), ema_params(0.999))`.

    Args:
      decay: Weight of the old average at each update. As in `optax.ema` with debiasing, the initial parameters have no
        weight. The average is stored in float32 or wider.

    Raises:
      JaxparError: If the decay is not a number in [0, 1).
    """
    if isinstance(decay, bool) or not isinstance(decay, int | float) or not 0 <= decay < 1:
        rule = "a decay is a number from 0 to below 1"
        raise refuse(f"ema_params({decay!r:.60})", rule=rule, fix="ema_params(0.999)")

    log = math.log(decay) if decay else -math.inf

    def init(params: Tree) -> EmaParamsState:
        # a copy, so that it can be donated together with the parameters
        mean = jax.tree.map(lambda x: jnp.array(x, jnp.promote_types(x.dtype, jnp.float32), copy=True), params)
        return EmaParamsState(ema_count=jnp.zeros((), jnp.int32), ema_params=mean)

    def update(updates: Tree, state: Tree, params: Tree | None = None) -> tuple[Tree, Any]:
        if params is None:
            raise refuse("ema_params without parameters", rule="it averages them", fix="update(updates, state, params)")
        count = jnp.asarray(optax.safe_increment(state.ema_count))
        # 1 - decay^count through the logarithm: in float32 a decay near 1 rounds to 1, and its powers lose digits
        share = (decay - 1) / jnp.expm1(count.astype(jnp.float32) * log)

        def one(mean: jax.Array, new: jax.Array) -> jax.Array:
            return mean + share.astype(mean.dtype) * (new.astype(mean.dtype) - mean)

        mean = jax.tree.map(one, state.ema_params, optax.apply_updates(params, updates))
        return updates, EmaParamsState(ema_count=count, ema_params=mean)

    return optax.GradientTransformation(init, update)


def _by_path(tree: Tree) -> dict[str, Any]:
    return {_path(keys): leaf for keys, leaf in jax.tree_util.tree_leaves_with_path(tree)}


def _path(keys: KeyPath) -> str:
    return jax.tree_util.keystr(keys, simple=True, separator="/")
