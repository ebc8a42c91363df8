"""Reuses the computed gradient norm in an optimizer that computes it too.

The optimizer's update is traced, and every value that equals `optax.tree.norm` of the gradients, by its equations, is
replaced by the known norm. All else is unchanged, and so is an update without a norm.
"""

from collections.abc import Callable, Hashable
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    Literal,
    jaxpr_as_fun,
)

from jaxpar.jaxprs.dataflow import Traced, needed_equations
from jaxpar.sharding.names import Tree
from jaxpar.step.norm.sharded import optax_norm


def with_norm(update: Callable[[Tree], Any], gradients: Tree, norm: jax.Array) -> Any:
    """Returns `update(gradients)`, with its norm of all gradients replaced by `norm`.

    Args:
      update: Returns a tree of arrays.
      gradients: The gradients of all parameters.
      norm: `optax.tree.norm(gradients)`, up to rounding. Shape [].
    """
    traced, norm_jaxpr = Traced(update, gradients), Traced(optax_norm, gradients).closed.jaxpr
    values = Values({})
    norm_number = values.number_vars(norm_jaxpr)[norm_jaxpr.outvars[0]]
    jaxpr = traced.closed.jaxpr
    norm_vars = [
        var for var, value in Values(values.numbers, grows=False).number_vars(jaxpr).items() if value == norm_number
    ]
    if not norm_vars:
        return traced(gradients)
    eqns = [eqn for eqn in jaxpr.eqns if not {*norm_vars}.intersection(eqn.outvars)]
    effect_vars = [var for eqn in eqns if eqn.effects for var in eqn.invars]  # of jax.debug.print etc.
    live = set(map(id, needed_equations(eqns, [*jaxpr.outvars, *effect_vars])[0]))
    eqns = [eqn for eqn in eqns if id(eqn) in live or eqn.effects]
    rewritten = ClosedJaxpr(jaxpr.replace(invars=[*jaxpr.invars, *norm_vars], eqns=eqns), traced.closed.consts)
    out = jaxpr_as_fun(rewritten)(*jax.tree.leaves(gradients), *(norm.astype(var.aval.dtype) for var in norm_vars))
    return jax.tree.unflatten(traced.outputs, out)


class Values:
    """Value numbering for jaxprs of the same arguments: values of equal equations get equal numbers.

    Attributes:
      numbers: The number of each argument, literal, and equation with the numbers of its inputs.
      grows: Whether unknown equations get a new number; otherwise they have none.
    """

    def __init__(self, numbers: dict[Hashable, int], *, grows: bool = True):
        self.numbers, self.grows = numbers, grows

    def number_vars(self, jaxpr: Jaxpr) -> dict[Any, int]:
        """Returns the number of each variable that has one."""
        numbers: dict[Any, int] = {}
        for i, var in enumerate(jaxpr.invars):
            self._note(numbers, var, ("argument", i))
        for eqn in jaxpr.eqns:
            inputs = [self._literal(var) if isinstance(var, Literal) else numbers.get(var) for var in eqn.invars]
            if None in inputs or eqn.effects:
                continue
            signature = (eqn.primitive.name, tuple(sorted((key, str(value)) for key, value in eqn.params.items())))
            for i, var in enumerate(eqn.outvars):
                self._note(numbers, var, (*signature, *inputs, i))
        return numbers

    def _literal(self, literal: Literal) -> int | None:
        return self._number(("literal", str(literal.aval), str(literal.val)))

    def _note(self, found: dict[Any, int], var: Any, key: Hashable) -> None:
        if (number := self._number(key)) is not None:
            found[var] = number

    def _number(self, key: Hashable) -> int | None:
        return self.numbers.setdefault(key, len(self.numbers)) if self.grows else self.numbers.get(key)
