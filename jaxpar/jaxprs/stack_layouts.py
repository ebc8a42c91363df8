"""Gives results of batched matmuls, such as attention's scores, one layout in a forward and a backward scan.

    by default   forward scan ──► stack ──► copy of the whole stack in another layout ──► backward scan
    one layout   forward scan ──► stack ──────────────────────────────────────────────► backward scan

XLA lays out the operands of each scan's matmuls by themselves, and copies all layers of a stack in between, so that
scores exist twice between the passes. In row-major layout a matmul at most copies its operand, one layer. Other stacks
are left to XLA: with a layout, heads of queries and keys were copied, and no time was saved.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.layout import Layout, with_layout_constraint
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
)

from jaxpar.jaxprs.dataflow import CALLS, Scan, rewrite, shapes, unwrap_jaxpr, variables

MATRIX = 2  # dims up to which XLA was observed to use one layout


def keep_stack_layouts(function: Callable) -> Callable:
    """Rewrites a function: results of batched matmuls that one of its scans stacks and another reads are row-major.

    So are arrays that elementwise ops make of such results.

    Args:
      function: Computes gradients of pytrees of arrays, by scans that are top-level equations.
    """
    return rewrite(function, _constrain_scans)


def _constrain_scans(jaxpr: Jaxpr) -> Jaxpr:
    scans = [Scan(eqn) for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    products = {var for scan in scans for var in _stacked_products(scan)}
    inputs = {var for scan in scans for var in variables(scan.eqn.invars[len(scan.eqn.invars) - scan.xs :])}
    stacks = products & inputs
    eqns = [_constrain_body(eqn, stacks) if eqn.primitive.name == "scan" else eqn for eqn in jaxpr.eqns]
    return jaxpr.replace(eqns=eqns) if stacks else jaxpr


def _stacked_products(scan: Scan) -> set[Var]:
    products = _products(scan.body, set())
    pairs = zip(scan.eqn.outvars[scan.carry :], scan.body.outvars[scan.carry :], strict=True)
    return {outer for outer, inner in pairs if _is_in(products, inner)}


def _products(jaxpr: Jaxpr, products: set[Any]) -> set[Any]:
    """Returns the results of batched matmuls, those given, and arrays of as many entries that are computed of them."""
    products = {*products}
    for eqn in jaxpr.eqns:
        if eqn.primitive.name == "dot_general":
            (_, _), (batch, _) = eqn.params["dimension_numbers"]
            products |= {*eqn.outvars} if batch else set()
        elif eqn.primitive.name in CALLS:
            inner = unwrap_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))
            inner_products = {
                inner_var for inner_var, var in zip(inner.invars, eqn.invars, strict=True) if _is_in(products, var)
            }
            results = _products(inner, inner_products)
            products |= {
                var for var, inner_var in zip(eqn.outvars, inner.outvars, strict=True) if _is_in(results, inner_var)
            }
        else:
            operands: set[Any] = variables(eqn.invars) & products
            entries = {var.aval.size for var in operands}
            products |= {var for var in eqn.outvars if getattr(var.aval, "size", None) in entries}
    return products


def _constrain_body(eqn: JaxprEqn, stacks: set[Var]) -> JaxprEqn:
    """Returns a scan with constraints on the layers of these stacks, where its body reads or makes them."""
    scan = Scan(eqn)
    body, first = scan.body, len(eqn.invars) - scan.xs
    invars: list[Any] = list(body.invars)
    outvars: list[Any] = list(body.outvars)
    before, after = [], []
    for place, var in enumerate(eqn.invars):
        inner = body.invars[place]
        if place >= first and _is_in(stacks, var) and _has_layouts(inner):
            constraint = _row_major(inner)
            before.append(constraint.replace(outvars=[inner]))
            invars[place] = constraint.invars[0]
    for place, var in enumerate(eqn.outvars):
        inner = body.outvars[place]
        if place >= scan.carry and var in stacks and not isinstance(inner, Literal) and _has_layouts(inner):
            constraint = _row_major(inner)
            after.append(constraint.replace(invars=[inner]))
            outvars[place] = constraint.outvars[0]
    if not before and not after:
        return eqn
    constrained = body.replace(invars=invars, outvars=outvars, eqns=[*before, *body.eqns, *after])
    return eqn.replace(params={**eqn.params, "jaxpr": ClosedJaxpr(constrained, scan.body_consts)})


def _is_in(products: set[Var], var: Var | Literal) -> bool:
    return not isinstance(var, Literal) and var in products


def _has_layouts(var: Any) -> bool:
    return var.aval.ndim > MATRIX and jnp.issubdtype(var.aval.dtype, jnp.floating)


def _row_major(var: Any) -> JaxprEqn:
    """Returns an equation, with new variables, that constrains an array of this shape to row-major layout."""
    layout = Layout(major_to_minor=tuple(range(var.aval.ndim)))
    (eqn,) = jax.make_jaxpr(lambda x: with_layout_constraint(x, layout))(*shapes([var])).eqns
    return eqn
