"""The frozen reference of a model that is trained on preferences: the model as it was when training began.

    params: blocks/attention/query             W   trained
            reference/blocks/attention/query   W0  a copy that the optimizer freezes, split as W is
            embed                                  frozen: the model and its reference share it

A model with adapters is its own reference without them, so nothing is copied. The copies are parameters that are
frozen: they have no gradient and no optimizer state, and checkpoints hold them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import jax

from jaxpar.errors import JaxparError, refuse
from jaxpar.optim.patterns import has_prefix, matching, unmatched
from jaxpar.sharding.adapters import ROOM as ADAPTERS
from jaxpar.sharding.adapters import SCALES, bind_base
from jaxpar.sharding.names import REFERENCE, Blueprint, Compute, Tree, Use, leaves_by_path, nest


class PolicyAndReference(NamedTuple):
    """The two models that a loss on preferences gets.

    Attributes:
      policy: The model that is trained.
      reference: The model as it was at the start, without dropout.
    """

    policy: Any
    reference: Any


def with_reference(blueprint: Blueprint, trained: Sequence[str] | None = None) -> Blueprint:
    """Adds a frozen reference to a model.

    Args:
      blueprint: The model, with its adapters if it has some.
      trained: Patterns of the parameters that are trained; the reference has copies of them, and shares all others.
        None means all parameters; if the model has adapters, these alone.

    Raises:
      JaxparError: If a pattern matches no parameter, or the model has a reference, a parameter of that name, or
        statistics that training changes.
    """
    _check(blueprint)
    own = [path for path in blueprint.leaves if not (blueprint.adapters and _belongs_to_adapters(path))]
    patterns = (() if blueprint.adapters else ("*",)) if trained is None else tuple(trained)
    if problems := unmatched("trained", patterns, own):
        raise JaxparError(*problems)
    copied = matching(own, patterns)

    def init(key: jax.Array) -> tuple[Tree, Tree]:
        params, rest = blueprint.init(key)
        return _with_copies(copied, params), rest

    def bind(params: Tree, rest: Tree, use: Use, compute: Compute) -> PolicyAndReference:
        values = {path: value for path, value in params.items() if path != REFERENCE}
        policy = blueprint.bind(values, rest, use, compute)
        return PolicyAndReference(policy, _bind_reference(blueprint, frozenset(copied), params, rest, use, compute))

    assigned = blueprint.assigned
    return replace(
        blueprint,
        leaves={**blueprint.leaves, **{f"{REFERENCE}/{path}": blueprint.leaves[path] for path in copied}},
        init=init,
        bind=bind,
        collect=lambda bound: blueprint.collect(bound.policy),
        assigned=None if assigned is None else lambda bound: assigned(bound.policy),
        base=blueprint.base or blueprint,
        copies={f"{REFERENCE}/{path}": path for path in copied},
        shared=frozenset(own) - frozenset(copied),
        has_reference=True,
    )


def copy_to_reference(blueprint: Blueprint, params: Tree) -> Tree:
    """Returns parameters whose reference is a copy of the model's present values.

    Args:
      blueprint: The model with its reference.
      params: All of its parameters, nested dicts.
    """
    return _with_copies(list(blueprint.copies.values()), params)


def _check(blueprint: Blueprint) -> None:
    if blueprint.has_reference or (conflicts := [path for path in blueprint.leaves if has_prefix(path, REFERENCE)]):
        raise refuse(
            f"{blueprint.name} has {'a reference' if blueprint.has_reference else f'the parameter {conflicts[0]}'}",
            rule=f"parameters of a reference are called {REFERENCE}/..., and a model has one reference",
            fix="jp.add_reference once, or another name of that module",
        )
    statistics = [
        path
        for path, leaf in blueprint.other_leaves.items()
        if not leaf.constant and jax.numpy.issubdtype(leaf.dtype, jax.numpy.inexact)
    ]
    if statistics:
        raise refuse(
            f"{blueprint.name} has the state {statistics[0]}, which training changes",
            rule="a reference stays as it was, and shares all state but parameters with the model",
            fix="a model without such state: LayerNorm or RMSNorm in place of BatchNorm",
        )


def _belongs_to_adapters(path: str) -> bool:
    return has_prefix(path, ADAPTERS) or has_prefix(path, SCALES)


def _with_copies(copied: Sequence[str], params: Tree) -> Tree:
    if not copied:
        return params
    flat = leaves_by_path(params)
    return params | {REFERENCE: nest({tuple(path.split("/")): flat[path] for path in copied})}


def _bind_reference(
    blueprint: Blueprint, copied: frozenset[str], params: Mapping[str, object], rest: Tree, use: Use, compute: Compute
) -> Any:
    """Binds the reference: the copies, the parameters that it shares, and no correction by adapters."""
    flat = {path: jax.lax.stop_gradient(value) for path, value in leaves_by_path(params).items()}
    values = {path: flat[f"{REFERENCE}/{path}" if path in copied else path] for path in blueprint.leaves}
    tree = nest({tuple(path.split("/")): value for path, value in values.items()})

    def read_copy(path: str, value: jax.Array) -> jax.Array:
        return use(f"{REFERENCE}/{path}" if path in copied else path, value)

    bind = bind_base if blueprint.adapters else _bind_plain
    return bind(blueprint, tree, rest, read_copy, replace(compute, train=False))


def _bind_plain(blueprint: Blueprint, values: Tree, rest: Tree, use: Use, compute: Compute) -> Any:
    return blueprint.bind(values, rest, use, compute)
