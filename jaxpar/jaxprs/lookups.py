"""Lookups by index inside a pipeline in which both sequences and tables are sharded.

    table [vocab / tensor, embed], ids [batch, seq / context]
        gather ids ─► each device looks up its shard ─► sum over tensor ─► [batch, seq, embed] ─► seq / context

XLA (jaxlib 0.10 to 0.12) aborts the process when it partitions a gather whose table is split over one axis and whose
indices are split over another, while a third, `pipe`, is manual. So this module replicates the indices and results of
each gather and scatter in the model, and leaves the table sharded. JAX differentiates these constraints together with
the lookup, so the gradient of a gather, a scatter, also has replicated indices and updates. Lookups with a table per
example, such as those of a mixture of experts, are not changed.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.errors import refuse
from jaxpar.jaxprs.dataflow import OPAQUE, Env, jaxprs_in_params, replace_equations, rewrite, rewrite_param

Whole = Callable[[jax.Array], jax.Array]


def replicate_lookups(function: Callable, replicate: Whole) -> Callable:
    """Rewrites a function to apply `replicate` to the indices and results of all lookups.

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
        if _looks_up(eqn):
            _, *indices = eqn.invars  # all operands except the table: the indices, and the updates of a scatter
            originals = {var: env[var] for var in indices if not isinstance(var, Literal)}
            env.update({var: whole(value) for var, value in originals.items()})
            env.run(eqn)
            # other equations read the indices with their previous sharding
            env.update({var: whole(env[var]) for var in eqn.outvars} | originals)
        else:
            env.run(_replicate_inside(eqn, whole))
    return [env[var] for var in jaxpr.outvars]


def _looks_up(eqn: JaxprEqn) -> bool:
    """Whether an equation looks up entries of a table that all examples share."""
    name = eqn.primitive.name
    if name != "gather" and not name.startswith("scatter"):
        return False
    return not eqn.params["dimension_numbers"].operand_batching_dims


def _has_lookup(eqn: JaxprEqn) -> bool:
    return _looks_up(eqn) or any(_has_lookup(inner) for jaxpr in jaxprs_in_params(eqn.params) for inner in jaxpr.eqns)


def _replicate_inside(eqn: JaxprEqn, whole: Whole) -> JaxprEqn:
    """Replicates the lookups inside of an equation's loops, branches and calls."""
    if not _has_lookup(eqn):
        return eqn
    if eqn.primitive.name.startswith("custom_"):
        raise refuse(
            f"a lookup by index inside a function with a custom gradient ({eqn.primitive.name})",
            rule="with pipe and context or expert, lookups stand outside of functions with a custom gradient: jaxpar "
            "sets the sharding of their indices and results, in the backward too",
            fix="move the lookup out of that function, or tensor=1",
        )

    def changed(value: object) -> Any:
        if isinstance(value, ClosedJaxpr):
            return jax.make_jaxpr(lambda *args: _run(value.jaxpr, value.consts, args, whole))(*value.in_avals)
        if isinstance(value, Jaxpr):
            return changed(ClosedJaxpr(value, ())).jaxpr
        return tuple(map(changed, value)) if type(value) is tuple else value

    return eqn.replace(params={name: changed(value) for name, value in eqn.params.items()})


# Computes mixed matmuls of float32 and bfloat16 in bfloat16, in a step whose compute dtype is bfloat16.
#
#     h [float32] @ table.T [bfloat16]    JAX's promotion: both operands in float32
#                                         in such a step: both in bfloat16, and the result in float32 as before
#
# Promotion to float32 is a default, not the author's choice: a single float32 angle, mask or image would promote every
# layer after it, and the head that reads the embedding's table. Explicit choices stay: a matmul of two float32
# operands, and one with a `precision`.

_SHORT, _LONG = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)


def demote_matmuls(function: Callable) -> Callable:
    """Rewrites a function to compute matmuls of a float32 and a bfloat16 operand in bfloat16.

    Args:
      function: A function of pytrees of arrays.
    """
    return rewrite(function, _demote_in_jaxpr)


def _demote_in_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    return replace_equations(jaxpr, _replacement_equations)


def _replacement_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations that replace an equation; itself, unless it is or contains a promoted matmul."""
    if _is_promoted(eqn):
        yield from _bfloat16_matmul(eqn)
    elif eqn.primitive.name.startswith(OPAQUE):
        yield eqn
    else:
        params = {name: rewrite_param(value, _demote_in_jaxpr) for name, value in eqn.params.items()}
        yield eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _is_promoted(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general" or {_dtype(var) for var in eqn.invars} != {_SHORT, _LONG}:
        return False
    default = jax.lax.Precision.DEFAULT
    return eqn.params["precision"] in (None, default, (default, default))


def _bfloat16_matmul(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations of the matmul in bfloat16, with its source line and named scope."""

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        params = {**eqn.params, "preferred_element_type": _SHORT}
        result = eqn.primitive.bind(left.astype(_SHORT), right.astype(_SHORT), **params)
        return result.astype(_dtype(eqn.outvars[0]))

    jaxpr = jax.make_jaxpr(product)(*(var.aval for var in eqn.invars)).jaxpr
    names: dict[Any, Any] = dict(zip([*jaxpr.invars, *jaxpr.outvars], [*eqn.invars, *eqn.outvars], strict=True))
    for new in jaxpr.eqns:
        ins, outs = ([names.get(var, var) for var in variables] for variables in (new.invars, new.outvars))
        yield new.replace(invars=ins, outvars=outs, source_info=eqn.source_info)


def _dtype(var: Any) -> Any:
    return var.aval.dtype
