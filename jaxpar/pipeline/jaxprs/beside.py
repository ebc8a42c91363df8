"""Low-rank corrections of matrices, multiplied beside them.

    x @ low_rank_sum(W, A, B)    as the model reads it: W + A B, whose gradient is as large as W
    x @ W + (x @ A) @ B          as a step runs it: the gradients of A and B alone, and so little to reduce

Of a W in 8 bits, x @ W is (x @ W as floats) * scales, and what the backward pass keeps is W as it is stored.
Where a matrix is read otherwise (a lookup, a transpose, a custom gradient), the sum stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import Jaxpr, JaxprEqn, Literal, Var, jaxpr_as_fun, jaxprs_in_params

from jaxpar.models.blocks.eight_bits import keeping
from jaxpar.models.low_rank import NAME
from jaxpar.pipeline.jaxprs.dataflow import changed_inside, rewritten, variables

_JIT = ("jit", "pjit")  # releases of JAX name it differently
_OWN = ("custom_", "shard_map")  # a custom gradient, or what runs on one device, is left as its author wrote it


def beside(function: Callable) -> Callable:
    """Returns a function that multiplies with W, A and B where it would with W + A B.

    Args:
      function: A function of pytrees of arrays.
    """
    return rewritten(function, _changed)


@dataclass(frozen=True)
class _Sum:
    """A variable that is W + A B, as its three variables, or four with scales, in a dtype."""

    parts: tuple[Any, ...]
    dtype: Any


class _Rewriting:
    """The equations of a jaxpr, rewritten one after the other.

    Attributes:
      eqns: Those so far.
      sums: The variables that are sums.
      known: Variables of calls that were inlined, as what they stand for.
    """

    def __init__(self):
        self.eqns: list[JaxprEqn] = []
        self.sums: dict[Var, _Sum] = {}
        self.known: dict[Var, Any] = {}

    def at(self, var: Any) -> Any:
        return var if isinstance(var, Literal) else self.known.get(var, var)

    def take(self, eqn: JaxprEqn) -> None:
        eqn = eqn.replace(invars=[self.at(var) for var in eqn.invars])
        name, given = eqn.primitive.name, [self._sum(var) for var in eqn.invars]
        made: Any = eqn.outvars[0].aval if eqn.outvars else None
        if _is_sum(eqn):
            self.sums[eqn.outvars[0]] = _Sum(tuple(eqn.invars), made.dtype)
        elif name == "convert_element_type" and given[0]:
            self.sums[eqn.outvars[0]] = replace(given[0], dtype=made.dtype)
        elif name == "dot_general" and sum(map(bool, given)) == 1 and self._multiplied(eqn, given):
            return
        elif name in _JIT and (any(given) or _holds_sum(eqn)) and self._inlined(eqn):
            return
        elif not name.startswith(_OWN) and _holds_sum(eqn):
            eqn = eqn.replace(params={key: changed_inside(value, _changed) for key, value in eqn.params.items()})
        self.eqns.append(eqn)

    def _sum(self, var: Any) -> _Sum | None:
        return None if isinstance(var, Literal) else self.sums.get(var)

    def _multiplied(self, eqn: JaxprEqn, given: Sequence[_Sum | None]) -> bool:
        """Takes a matmul with a sum, if it is over the inputs of the matrix or over its outputs."""
        at = 0 if given[0] else 1
        of = given[0] or given[1]
        if of is None:
            return False
        (contract, batch) = eqn.params["dimension_numbers"]
        inputs, rank = len(of.parts[1].aval.shape) - 1, len(of.parts[0].aval.shape)
        over = "inputs" if sorted(contract[at]) == list(range(inputs)) else "outputs"
        if batch[0] or (over == "outputs" and sorted(contract[at]) != list(range(inputs, rank))):
            return False
        product = partial(_product, eqn=eqn, at=at, over=over, dtype=of.dtype)
        return self._spliced(product, eqn, [eqn.invars[1 - at], *of.parts])

    def _inlined(self, eqn: JaxprEqn) -> bool:
        return self._spliced(jaxpr_as_fun(eqn.params["jaxpr"]), eqn, eqn.invars)

    def _spliced(self, function: Callable, eqn: JaxprEqn, ins: Sequence[Any]) -> bool:
        """Takes the equations of a function of these variables in place of an equation, with its line and scope."""
        made = jax.make_jaxpr(function)(*(var.aval for var in ins))
        if made.consts:
            return False
        self.known |= dict(zip(made.jaxpr.invars, ins, strict=True))
        for each in made.jaxpr.eqns:
            self.take(each.replace(source_info=eqn.source_info) if eqn.primitive.name == "dot_general" else each)
        self.known |= {var: self.at(out) for var, out in zip(eqn.outvars, made.jaxpr.outvars, strict=True)}
        return True

    def needed(self, outs: Sequence[Any]) -> list[JaxprEqn]:
        """Returns the equations without those of sums that nothing reads any more."""
        kept, read = [], variables(outs)
        for eqn in reversed(self.eqns):
            if read.intersection(eqn.outvars) or not self.sums.keys() & set(eqn.outvars):
                kept.append(eqn)
                read |= variables(eqn.invars)
        return kept[::-1]


def _changed(jaxpr: Jaxpr) -> Jaxpr:
    if not any(map(_holds_sum, jaxpr.eqns)):
        return jaxpr
    rewriting = _Rewriting()
    for eqn in jaxpr.eqns:
        rewriting.take(eqn)
    outs = [rewriting.at(var) for var in jaxpr.outvars]
    return jaxpr.replace(eqns=rewriting.needed(outs), outvars=outs)


def _is_sum(eqn: JaxprEqn) -> bool:
    """Returns whether an equation is W + A B of one matrix: not of several at once, as `jax.vmap` makes it."""
    if eqn.primitive.name not in _JIT or eqn.params["name"] != NAME:
        return False
    given: list[Any] = [*eqn.invars]
    base, first, second, *_ = (len(var.aval.shape) for var in given)
    return base == first + second - 2


def _holds_sum(eqn: JaxprEqn) -> bool:
    return _is_sum(eqn) or any(_holds_sum(each) for inner in jaxprs_in_params(eqn.params) for each in inner.eqns)


def _product(
    x: jax.Array, base: jax.Array, first: jax.Array, second: jax.Array, *scales: jax.Array, eqn, at, over, dtype
) -> jax.Array:
    """Returns the matmul of x, and W + A B, over the inputs or the outputs of W."""
    (contract, _) = eqn.params["dimension_numbers"]
    run = partial(_with, eqn=eqn, at=at, over=over, dtype=dtype)
    out = keeping(run, x, base, *scales) if scales else run(x, base)
    how = {key: eqn.params[key] for key in ("precision", "preferred_element_type")}
    inputs = first.ndim - 1
    mine, other = contract[1 - at], contract[at]
    if over == "inputs":
        near, far, last = first, second, 0
    else:
        near, far, last, other = second, first, inputs, tuple(dim - inputs + 1 for dim in other)
    small = jax.lax.dot_general(x, near.astype(dtype), ((mine, other), ((), ())), **how).astype(x.dtype)
    more = jax.lax.dot_general(small, far.astype(dtype), (((small.ndim - 1,), (last,)), ((), ())), **how)
    free = small.ndim - 1  # dims of x that stay: a matmul puts those of its left operand first
    if at == 0:
        more = jnp.moveaxis(more, tuple(range(free)), tuple(range(more.ndim - free, more.ndim)))
    return out + more.astype(out.dtype)


def _with(x: jax.Array, base: jax.Array, *scales: jax.Array, eqn, at, over, dtype) -> jax.Array:
    """Returns the matmul of x and W; of one in 8 bits the scales are multiplied with what is of W's outputs."""
    (contract, _) = eqn.params["dimension_numbers"]
    if scales and over == "outputs":
        inputs = base.ndim - scales[0].ndim
        x = _scaled(x, *scales, dims=[contract[1 - at][contract[at].index(dim)] for dim in range(inputs, base.ndim)])
    base = base.astype(dtype)
    out = eqn.primitive.bind(*((base, x) if at == 0 else (x, base)), **eqn.params)
    if scales and over == "inputs":
        begin = 0 if at == 0 else out.ndim - scales[0].ndim
        out = _scaled(out, *scales, dims=range(begin, begin + scales[0].ndim))
    return out


def _scaled(x: jax.Array, scales: jax.Array, *, dims: Sequence[int]) -> jax.Array:
    """Returns x, each entry multiplied by the scale of its output: dim i of the scales is dim `dims[i]` of x."""
    order = sorted(range(len(dims)), key=lambda i: dims[i])
    beside = jax.lax.broadcast_in_dim(jnp.transpose(scales, order), x.shape, [dims[i] for i in order])
    return (x.astype(beside.dtype) * beside).astype(x.dtype)
