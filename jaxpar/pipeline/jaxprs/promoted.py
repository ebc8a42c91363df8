"""Matmuls of a float32 and a bfloat16 operand, computed in bfloat16, where a step computes in that.

    h [float32] @ table.T [bfloat16]    by JAX's promotion: both in float32
                                        in such a step: both in bfloat16, and the result float32 as before

That float32 wins is a rule for dtypes that nobody chose: one angle, mask or image that is float32 would carry every
layer after it along, and the head that reads the embedding's table. What an author did choose stays: a matmul of two
float32 operands, and one with a `precision` of its own.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.pipeline.jaxprs.dataflow import changed_inside, rewritten

_SHORT, _LONG = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_OWN = ("custom_", "shard_map")  # a custom gradient, or what runs on one device, is left as its author wrote it


def in_bfloat16(function: Callable) -> Callable:
    """Returns a function that computes matmuls of a float32 and a bfloat16 operand in bfloat16.

    Args:
      function: A function of pytrees of arrays.
    """
    return rewritten(function, _changed)


def _changed(jaxpr: Jaxpr) -> Jaxpr:
    eqns = [new for eqn in jaxpr.eqns for new in _equations(eqn)]
    same = len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if same else jaxpr.replace(eqns=eqns)


def _equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields what stands in place of an equation: itself, but for matmuls that are promoted and what holds them."""
    if _is_promoted(eqn):
        yield from _short(eqn)
    elif eqn.primitive.name.startswith(_OWN):
        yield eqn
    else:
        params = {name: changed_inside(value, _changed) for name, value in eqn.params.items()}
        yield eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _is_promoted(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general" or {_dtype(var) for var in eqn.invars} != {_SHORT, _LONG}:
        return False
    default = jax.lax.Precision.DEFAULT
    return eqn.params["precision"] in (None, default, (default, default))


def _short(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations of a matmul in bfloat16, which have its source line and named scope."""

    def product(left: jax.Array, right: jax.Array) -> jax.Array:
        params = {**eqn.params, "preferred_element_type": _SHORT}
        made = eqn.primitive.bind(left.astype(_SHORT), right.astype(_SHORT), **params)
        return made.astype(_dtype(eqn.outvars[0]))

    jaxpr = jax.make_jaxpr(product)(*(var.aval for var in eqn.invars)).jaxpr
    known: dict[Any, Any] = dict(zip([*jaxpr.invars, *jaxpr.outvars], [*eqn.invars, *eqn.outvars], strict=True))
    for each in jaxpr.eqns:
        ins, outs = ([known.get(var, var) for var in variables] for variables in (each.invars, each.outvars))
        yield each.replace(invars=ins, outvars=outs, source_info=eqn.source_info)


def _dtype(var: Any) -> Any:
    return var.aval.dtype
