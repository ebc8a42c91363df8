"""Computes mixed matmuls of float32 and bfloat16 in bfloat16, in a step whose compute dtype is bfloat16.

    h [float32] @ table.T [bfloat16]    JAX's promotion: both operands in float32
                                        in such a step: both in bfloat16, and the result in float32 as before

Promotion to float32 is a default, not the author's choice: a single float32 angle, mask or image would promote every
layer after it, and the head that reads the embedding's table. Explicit choices stay: a matmul of two float32 operands,
and one with a `precision`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn

from jaxpar.jaxprs.dataflow import rewrite, rewrite_param

_SHORT, _LONG = jnp.dtype(jnp.bfloat16), jnp.dtype(jnp.float32)
_OWN = ("custom_", "shard_map")  # custom gradients and shard_map bodies are not rewritten


def demote_matmuls(function: Callable) -> Callable:
    """Returns the function with matmuls of a float32 and a bfloat16 operand computed in bfloat16.

    Args:
      function: A function of pytrees of arrays.
    """
    return rewrite(function, _changed)


def _changed(jaxpr: Jaxpr) -> Jaxpr:
    eqns = [new for eqn in jaxpr.eqns for new in _equations(eqn)]
    unchanged = len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if unchanged else jaxpr.replace(eqns=eqns)


def _equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the replacement of an equation: itself, unless it is or contains a promoted matmul."""
    if _is_promoted(eqn):
        yield from _short(eqn)
    elif eqn.primitive.name.startswith(_OWN):
        yield eqn
    else:
        params = {name: rewrite_param(value, _changed) for name, value in eqn.params.items()}
        yield eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)


def _is_promoted(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "dot_general" or {_dtype(var) for var in eqn.invars} != {_SHORT, _LONG}:
        return False
    default = jax.lax.Precision.DEFAULT
    return eqn.params["precision"] in (None, default, (default, default))


def _short(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
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
