"""FLOP of a model, counted in its jaxpr: two for every multiplication and addition of a matrix product.

Recomputation is not counted: this is the model's work, not the hardware's, as in MFU
(Chowdhery et al. 2022, arXiv:2204.02311, appendix B).
"""

import math
from collections.abc import Callable
from typing import Any

import jax


def forward_flop(function: Callable, *args: Any) -> int:
    """Returns the FLOP of one evaluation, matrix products and convolutions only.

    Args:
      function: Traced, not run.
      *args: Arrays or `jax.ShapeDtypeStruct`s.
    """
    return _count(jax.make_jaxpr(function)(*args).jaxpr)


def _count(jaxpr) -> int:
    total = 0
    for equation in jaxpr.eqns:
        name = equation.primitive.name
        if name == "dot_general":
            (contract, _), _ = equation.params["dimension_numbers"]
            left = equation.invars[0].aval.shape
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(left[dim] for dim in contract)
        elif name == "conv_general_dilated":
            kernel = equation.invars[1].aval.shape
            out_features = equation.params["dimension_numbers"].rhs_spec[0]
            total += 2 * math.prod(equation.outvars[0].aval.shape) * math.prod(kernel) // kernel[out_features]
        times = equation.params.get("length", 1) if name == "scan" else 1
        inner = [_count(sub) for value in equation.params.values() for sub in _jaxprs(value)]
        total += max(inner, default=0) if name == "cond" else times * sum(inner)
    return total


def _jaxprs(value):
    if hasattr(value, "eqns"):
        yield value
    elif hasattr(value, "jaxpr"):
        yield value.jaxpr
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from _jaxprs(item)
