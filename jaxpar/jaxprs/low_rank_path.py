"""LoRA as a separate path: rewrites x @ (W + A B) to x @ W + (x @ A) @ B.

    x @ low_rank_sum(W, A, B)    in the model: W + A B, whose gradient is as large as W
    x @ W + (x @ A) @ B          in a step: gradients of A and B only, which are small to reduce

With W in 8 bits, x @ W is (x @ W as floats) * scales, and the backward pass saves the 8-bit W.
If the matrix is not an operand of a matmul (in a lookup, a transpose, a custom gradient), the sum is computed.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from jaxpar.jaxprs.dataflow import OPAQUE, rewrite, rewrite_param, variables
from jaxpar.models.low_rank import NAME, save_int8_residuals

_JIT = ("jit", "pjit")  # releases of JAX name it differently


def separate_low_rank(function: Callable) -> Callable:
    """Rewrites the matmuls by W + A B in a function to matmuls by W, A and B.

    Args:
      function: A function of pytrees of arrays.
    """
    return rewrite(function, _rewrite_jaxpr)


@dataclass(frozen=True)
class _Sum:
    """A variable equal to W + A B: the variables W, A, B and, if W is in 8 bits, its scales; and its dtype."""

    parts: tuple[Any, ...]
    dtype: Any


class _Rewriter:
    """Rewrites the equations of a jaxpr in order.

    Attributes:
      eqns: The rewritten equations so far.
      sums: Maps each variable that is the sum of a matrix and a low-rank product to its terms.
      substitutes: Maps each variable of an inlined call to the variable or constant that replaces it.
    """

    def __init__(self):
        self.eqns: list[JaxprEqn] = []
        self.sums: dict[Var, _Sum] = {}
        self.substitutes: dict[Var, Any] = {}

    def substitute(self, var: Var | Literal) -> Any:
        return var if isinstance(var, Literal) else self.substitutes.get(var, var)

    def rewrite(self, eqn: JaxprEqn) -> None:
        eqn = eqn.replace(invars=[self.substitute(var) for var in eqn.invars])
        name, sums = eqn.primitive.name, [self._sum(var) for var in eqn.invars]
        result: Any = eqn.outvars[0].aval if eqn.outvars else None
        if _is_sum(eqn):
            self.sums[eqn.outvars[0]] = _Sum(tuple(eqn.invars), result.dtype)
        elif name == "convert_element_type" and sums[0]:
            self.sums[eqn.outvars[0]] = replace(sums[0], dtype=result.dtype)
        elif name == "dot_general" and sum(map(bool, sums)) == 1 and self._rewrite_matmul(eqn, sums):
            return
        elif name in _JIT and (any(sums) or _holds_sum(eqn)) and self._inline(eqn):
            return
        elif not name.startswith(OPAQUE) and _holds_sum(eqn):
            eqn = eqn.replace(params={key: rewrite_param(value, _rewrite_jaxpr) for key, value in eqn.params.items()})
        self.eqns.append(eqn)

    def _sum(self, var: Var | Literal) -> _Sum | None:
        return None if isinstance(var, Literal) else self.sums.get(var)

    def _rewrite_matmul(self, eqn: JaxprEqn, given: Sequence[_Sum | None]) -> bool:
        """Rewrites a matmul by a sum if it contracts all inputs or all outputs of W; returns whether it does."""
        side = 0 if given[0] else 1
        low_rank = given[0] or given[1]
        if low_rank is None:
            return False
        (contract, batch) = eqn.params["dimension_numbers"]
        inputs, rank = len(low_rank.parts[1].aval.shape) - 1, len(low_rank.parts[0].aval.shape)
        over = "inputs" if sorted(contract[side]) == list(range(inputs)) else "outputs"
        if batch[0] or (over == "outputs" and sorted(contract[side]) != list(range(inputs, rank))):
            return False
        product = partial(_product, eqn=eqn, at=side, over=over, dtype=low_rank.dtype)
        return self._splice(product, eqn, [eqn.invars[1 - side], *low_rank.parts])

    def _inline(self, eqn: JaxprEqn) -> bool:
        return self._splice(jaxpr_as_fun(eqn.params["jaxpr"]), eqn, eqn.invars)

    def _splice(self, function: Callable, eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
        """Replaces an equation by those of a function of `ins`, with its line and scope; returns True if it can."""
        closed = jax.make_jaxpr(function)(*(var.aval for var in ins))
        if closed.consts:
            return False
        self.substitutes |= dict(zip(closed.jaxpr.invars, ins, strict=True))
        for new_eqn in closed.jaxpr.eqns:
            self.rewrite(
                new_eqn.replace(source_info=eqn.source_info) if eqn.primitive.name == "dot_general" else new_eqn
            )
        self.substitutes |= {
            var: self.substitute(out) for var, out in zip(eqn.outvars, closed.jaxpr.outvars, strict=True)
        }
        return True

    def live_equations(self, outs: Sequence[object]) -> list[JaxprEqn]:
        """Returns the equations, except for sums that no equation reads any more."""
        needed_eqns, reads = [], variables(outs)
        for eqn in reversed(self.eqns):
            if reads.intersection(eqn.outvars) or not self.sums.keys() & set(eqn.outvars):
                needed_eqns.append(eqn)
                reads |= variables(eqn.invars)
        return needed_eqns[::-1]


def _rewrite_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    if not any(map(_holds_sum, jaxpr.eqns)):
        return jaxpr
    rewriting = _Rewriter()
    for eqn in jaxpr.eqns:
        rewriting.rewrite(eqn)
    outs = [rewriting.substitute(var) for var in jaxpr.outvars]
    return jaxpr.replace(eqns=rewriting.live_equations(outs), outvars=outs)


def _is_sum(eqn: JaxprEqn) -> bool:
    """Whether an equation is W + A B of a single matrix, not of a batch of matrices as under `jax.vmap`."""
    if eqn.primitive.name not in _JIT or eqn.params["name"] != NAME:
        return False
    operands: list[Any] = [*eqn.invars]
    base, first, second, *_ = (len(var.aval.shape) for var in operands)
    return base == first + second - 2


def _holds_sum(eqn: JaxprEqn) -> bool:
    return _is_sum(eqn) or any(_holds_sum(sub) for inner in jaxprs_in_params(eqn.params) for sub in inner.eqns)


def _product(
    x: jax.Array, base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array, eqn, at, over, dtype
) -> jax.Array:
    """Computes the matmul of x and W + A B, over the inputs or the outputs of W."""
    (contract, _) = eqn.params["dimension_numbers"]
    multiply = partial(_matmul, eqn=eqn, at=at, over=over, dtype=dtype)
    out = save_int8_residuals(multiply, x, base, *scales) if scales else multiply(x, base)
    params = {key: eqn.params[key] for key in ("precision", "preferred_element_type")}
    inputs = first.ndim - 1
    x_dims, w_dims = contract[1 - at], contract[at]
    if over == "inputs":
        a, b, last = first, second, 0
    else:
        a, b, last, w_dims = (second, first, inputs, tuple(dim - inputs + 1 for dim in w_dims))
    small = jax.lax.dot_general(x, a.astype(dtype), ((x_dims, w_dims), ((), ())), **params).astype(x.dtype)
    delta = jax.lax.dot_general(small, b.astype(dtype), (((small.ndim - 1,), (last,)), ((), ())), **params)
    free = small.ndim - 1  # dims of x that are not contracted: a matmul puts those of its left operand first
    if at == 0:
        delta = jnp.moveaxis(delta, tuple(range(free)), tuple(range(delta.ndim - free, delta.ndim)))
    return out + delta.astype(out.dtype)


def _matmul(x: jax.Array, base: jax.Array, *scales: jax.Array, eqn, at, over, dtype) -> jax.Array:
    """Computes the matmul of x and W; scales of an 8-bit W multiply the operand or result that has W's outputs."""
    (contract, _) = eqn.params["dimension_numbers"]
    if scales and over == "outputs":
        inputs = base.ndim - scales[0].ndim
        x = _times_scales(
            x, *scales, dims=[contract[1 - at][contract[at].index(dim)] for dim in range(inputs, base.ndim)]
        )
    base = base.astype(dtype)
    out = eqn.primitive.bind(*((base, x) if at == 0 else (x, base)), **eqn.params)
    if scales and over == "inputs":
        begin = 0 if at == 0 else out.ndim - scales[0].ndim
        out = _times_scales(out, *scales, dims=range(begin, begin + scales[0].ndim))
    return out


def _times_scales(x: jax.Array, scales: jax.Array, *, dims: Sequence[int]) -> jax.Array:
    """Multiplies x by the scales of W's outputs: dim i of the scales is dim `dims[i]` of x."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    factors = jax.lax.broadcast_in_dim(jnp.transpose(scales, order), x.shape, [dims[i] for i in order])
    return (x.astype(factors.dtype) * factors).astype(x.dtype)
