"""Lookups by index inside a pipeline in which both sequences and tables are sharded.

    table [vocab / tensor, embed], ids [batch, seq / context]
        gather ids ─► each device looks up its shard ─► sum over tensor ─► [batch, seq, embed] ─► seq / context

XLA (jaxlib 0.10 to 0.12) aborts the process when it partitions a gather whose table is split over one axis and whose
indices are split over another, while a third, `pipe`, is manual. So the indices and results of each gather and scatter
in the model are replicated, and the table stays sharded. JAX differentiates these constraints with the lookup: the
gradient of a gather, a scatter, is between the same two constraints.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import Env, primitives

Whole = Callable[[jax.Array], jax.Array]


def replicate_lookups(function: Callable, replicate: Whole) -> Callable:
    """Returns the function with `replicate` applied to the indices and results of all lookups.

    Args:
      function: A function of pytrees of arrays.
      replicate: Replicates an array over the axes that split it.

    Raises:
      JaxparError: At a call, if there is a lookup inside a function with a custom gradient.
    """

    def run(*args: Any) -> Any:
        leaves, tree = jax.tree.flatten(args)
        structures: list = []

        def flat(*leaves):
            out, structure = jax.tree.flatten(function(*jax.tree.unflatten(tree, leaves)))
            structures.append(structure)
            return out

        closed = jax.make_jaxpr(flat)(*leaves)
        return jax.tree.unflatten(structures[-1], _run(closed.jaxpr, closed.consts, leaves, replicate))

    return run


def _run(jaxpr: Jaxpr, consts: Sequence, args: Sequence, whole: Whole) -> list:
    env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        if _looks_up(eqn.primitive.name):
            _, *indices = eqn.invars  # all but the table: the indices, and the updates of a scatter
            originals = {var: env[var] for var in indices if not isinstance(var, Literal)}
            env.update({var: whole(value) for var, value in originals.items()})
            env.run(eqn)
            # other equations read the indices with their previous sharding
            env.update({var: whole(env[var]) for var in eqn.outvars} | originals)
        else:
            env.run(_inside(eqn, whole))
    return [env[var] for var in jaxpr.outvars]


def _looks_up(name: str) -> bool:
    return name == "gather" or name.startswith("scatter")


def _inside(eqn: JaxprEqn, whole: Whole) -> JaxprEqn:
    """Changes the lookups inside of an equation's loops, branches and calls."""
    if not any(map(_looks_up, primitives([eqn]))):
        return eqn
    if eqn.primitive.name.startswith("custom_"):
        raise refuse(
            f"a lookup by index inside a function with a custom gradient ({eqn.primitive.name})",
            rule="with pipe and context, lookups stand outside of functions with a custom gradient: jaxpar sets the "
            "sharding of their indices and results, in the backward too",
            fix="move the lookup out of that function, or context=1",
        )

    def changed(value: Any) -> Any:
        if isinstance(value, ClosedJaxpr):
            return jax.make_jaxpr(lambda *args: _run(value.jaxpr, value.consts, args, whole))(*value.in_avals)
        if isinstance(value, Jaxpr):
            return changed(ClosedJaxpr(value, ())).jaxpr
        return tuple(map(changed, value)) if type(value) is tuple else value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})
