"""Marks the activations of a loss, so that each is found again in the program of its gradients.

    forward      x    [batch, tokens, features]   mark 7
    recomputed   x    [batch, tokens, features]   mark 7, in the backward pass of a model with remat
    backward     dx   [batch, tokens, features]   mark 7

A mark is an identity with a number. JAX differentiates it to an identity of the gradient with the same number, and
repeats it where it recomputes the activation.
"""

from collections.abc import Callable, Collection
from itertools import count
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Primitive
from jax.interpreters import ad

from jaxpar.jaxprs.dataflow import OPAQUE, rewrite, rewrite_param

MARK = "activation_mark"


def _shape(aval: Any, *, number: int) -> Any:
    return aval


def _transpose(gradient: Any, _: Any, *, number: int) -> list[Any]:
    return [_MARK.bind(gradient, number=number)]


_MARK = Primitive(MARK)
_MARK.def_abstract_eval(_shape)
ad.deflinear2(_MARK, _transpose)


def mark_activations(function: Callable, elementwise: Collection[str]) -> Callable:
    """Wraps a function of pytrees of arrays to mark its floating-point arrays of two or more dims.

    Args:
      function: The function.
      elementwise: Primitives whose results are marked only if another operation reads them: the dims of their gradients
        are those of other arrays.
    """
    numbers = count()

    def mark_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
        multiplied = {id(var) for eqn in jaxpr.eqns if eqn.primitive.name not in elementwise for var in eqn.invars}
        return jaxpr.replace(eqns=[new for eqn in jaxpr.eqns for new in mark_results(eqn, multiplied)])

    def mark_results(eqn: JaxprEqn, multiplied: set[int]) -> list[JaxprEqn]:
        if not eqn.primitive.name.startswith(OPAQUE):
            eqn = eqn.replace(params={name: rewrite_param(value, mark_jaxpr) for name, value in eqn.params.items()})
        made: list[Any] = list(eqn.outvars)
        marks: list[JaxprEqn] = []
        for index, var in enumerate(eqn.outvars):
            if (eqn.primitive.name in elementwise and id(var) not in multiplied) or not _may_be_marked(var):
                continue
            mark = _mark_equation(var, next(numbers))
            made[index] = mark.invars[0]
            marks.append(mark.replace(outvars=[var], source_info=eqn.source_info))
        return [eqn.replace(outvars=made), *marks] if marks else [eqn]

    return rewrite(function, mark_jaxpr)


def _may_be_marked(var: Any) -> bool:
    aval = var.aval
    is_mutable = hasattr(aval, "inner_aval")
    return not is_mutable and len(getattr(aval, "shape", ())) > 1 and jnp.issubdtype(aval.dtype, jnp.inexact)


def _mark_equation(var: Any, number: int) -> JaxprEqn:
    shape = jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype)
    return jax.make_jaxpr(lambda x: _MARK.bind(x, number=number))(shape).jaxpr.eqns[0]
