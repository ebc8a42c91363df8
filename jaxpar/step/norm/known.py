"""An optimizer that computes the norm of its gradients takes the norm that is there.

Its update is traced, and where an equation makes what the equations of `optax.tree.norm` make of the same gradients,
the known norm stands instead. Whatever else it computes is left as it is: so is an update in which there is no norm.
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

from jaxpar.pipeline.jaxprs.dataflow import Traced, needed
from jaxpar.sharding.names import Tree
from jaxpar.step.norm.of_shards import as_optax


def with_norm(update: Callable[[Tree], Any], gradients: Tree, norm: jax.Array) -> Any:
    """Returns `update(gradients)`, in which the norm of all gradients is `norm`.

    Args:
      update: Returns a tree of arrays.
      gradients: Of all parameters.
      norm: What `optax.tree.norm(gradients)` is, but for rounding. Shape [].
    """
    traced, wanted = Traced(update, gradients), Traced(as_optax, gradients).closed.jaxpr
    values = Values({})
    sought = values.of(wanted)[wanted.outvars[0]]
    jaxpr = traced.closed.jaxpr
    found = [var for var, value in Values(values.numbers, grows=False).of(jaxpr).items() if value == sought]
    if not found:
        return traced(gradients)
    eqns = [eqn for eqn in jaxpr.eqns if not {*found}.intersection(eqn.outvars)]
    told = [var for eqn in eqns if eqn.effects for var in eqn.invars]  # what `jax.debug.print` and its kin read
    live = set(map(id, needed(eqns, [*jaxpr.outvars, *told])[0]))
    eqns = [eqn for eqn in eqns if id(eqn) in live or eqn.effects]
    changed = ClosedJaxpr(jaxpr.replace(invars=[*jaxpr.invars, *found], eqns=eqns), traced.closed.consts)
    out = jaxpr_as_fun(changed)(*jax.tree.leaves(gradients), *(norm.astype(var.aval.dtype) for var in found))
    return jax.tree.unflatten(traced.outputs, out)


class Values:
    """Numbers of values in jaxprs of the same arguments: equal where the same equations make them.

    Attributes:
      numbers: Of each equation, with the numbers of what it reads, and of arguments and literals.
      grows: Whether equations that are not in it get a number; else they have none.
    """

    def __init__(self, numbers: dict[Hashable, int], *, grows: bool = True):
        self.numbers, self.grows = numbers, grows

    def of(self, jaxpr: Jaxpr) -> dict[Any, int]:
        """Returns the number of each variable that has one."""
        found: dict[Any, int] = {}
        for i, var in enumerate(jaxpr.invars):
            self._note(found, var, ("argument", i))
        for eqn in jaxpr.eqns:
            read = [self._literal(var) if isinstance(var, Literal) else found.get(var) for var in eqn.invars]
            if None in read or eqn.effects:
                continue
            said = (eqn.primitive.name, tuple(sorted((key, str(value)) for key, value in eqn.params.items())))
            for i, var in enumerate(eqn.outvars):
                self._note(found, var, (*said, *read, i))
        return found

    def _literal(self, literal: Literal) -> int | None:
        return self._number(("literal", str(literal.aval), str(literal.val)))

    def _note(self, found: dict[Any, int], var: Any, key: Hashable) -> None:
        if (number := self._number(key)) is not None:
            found[var] = number

    def _number(self, key: Hashable) -> int | None:
        return self.numbers.setdefault(key, len(self.numbers)) if self.grows else self.numbers.get(key)
