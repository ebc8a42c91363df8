"""Casts the stacked parameters of scans to 16 bits before the scans, in place of one layer at a time.

    as the model reads them   stack [float32] ──► layer ──► cast ──► matmuls    gradients stacked in float32
    cast before the scan      stack ──► cast ──► layer ──► matmuls              gradients stacked in 16 bits

The values are the same: the gradient of the cast layer has 16 bits, and its cast to float32 follows the scan. The scan
would stack the cast layers anyway, as residuals of its backward. A layer with `jax.checkpoint` casts again in the
backward, in place of residuals: its parameters are left as they are.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
)

from jaxpar.jaxprs.dataflow import (
    CALLS,
    PLAIN_CALLS,
    Env,
    Scan,
    Traced,
    jaxpr_consts,
    replace_equations,
    rewrite,
    rewrite_param,
    shapes,
    unwrap_jaxpr,
)


def cast_stacks(function: Callable) -> Callable:
    """Rewrites a function so that scans read stacked inputs in fewer bits where all that their body does is cast them.

    Args:
      function: A function of pytrees of arrays, before it is differentiated.
    """
    return rewrite(function, _rewrite_jaxpr)


def uncast_gradients(function: Callable) -> Callable:
    """Rewrites a function so that it returns gradients before their last cast to a wider dtype.

    Args:
      function: Returns ((gradients, ...), ...), pytrees of arrays. The casts are top-level equations.
    """

    def run(*args: Any) -> Any:
        traced = Traced(function, *args)
        jaxpr, count = traced.closed.jaxpr, len(jax.tree.leaves(traced.shapes[0][0]))
        casts = {eqn.outvars[0]: eqn.invars[0] for eqn in jaxpr.eqns if _widens(eqn)}
        outs = [casts.get(var, var) if isinstance(var, Var) else var for var in jaxpr.outvars[:count]]
        changed = jaxpr.replace(outvars=[*outs, *jaxpr.outvars[count:]])
        results = jaxpr_as_fun(ClosedJaxpr(changed, traced.closed.consts))(*jax.tree.leaves(args))
        return jax.tree.unflatten(traced.outputs, results)

    return run


def _widens(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type" or isinstance(eqn.invars[0], Literal):
        return False
    old, new = shapes(eqn.invars)[0].dtype, shapes(eqn.outvars)[0].dtype
    return all(jnp.issubdtype(x, jnp.floating) for x in (old, new)) and old.itemsize < new.itemsize


def _rewrite_jaxpr(jaxpr: Jaxpr) -> Jaxpr:
    return replace_equations(jaxpr, _replacement_equations)


def _replacement_equations(eqn: JaxprEqn) -> Iterator[JaxprEqn]:
    """Yields the equations that replace an equation; itself, unless it is or calls a scan with such casts."""
    if eqn.primitive.name in CALLS:
        params = {name: rewrite_param(value, _rewrite_jaxpr) for name, value in eqn.params.items()}
        yield eqn if all(params[name] is value for name, value in eqn.params.items()) else eqn.replace(params=params)
        return
    casts = _casts_of_stacks(eqn) if eqn.primitive.name == "scan" else {}
    inputs = list(eqn.invars)
    for i, cast in casts.items():
        dtype = cast.params["new_dtype"]
        (new,) = jax.make_jaxpr(lambda x, dtype=dtype: x.astype(dtype))(*shapes([inputs[i]])).eqns
        yield new.replace(invars=[inputs[i]], source_info=cast.source_info)
        (inputs[i],) = new.outvars
    if not casts:
        yield eqn
        return
    body = _without_casts(eqn.params["jaxpr"], {i: cast.params["new_dtype"] for i, cast in casts.items()})
    yield eqn.replace(invars=inputs, params={**eqn.params, "jaxpr": body})


def _casts_of_stacks(eqn: JaxprEqn) -> dict[int, JaxprEqn]:
    """Returns the cast of each stacked input of a scan that its body only casts, by the number of the input."""
    scan = Scan(eqn)
    first = scan.consts + scan.carry
    casts = {i: _cast(scan.body, var) for i, var in enumerate(scan.body.invars) if i >= first}
    return {i: cast for i, cast in casts.items() if cast is not None}


def _cast(jaxpr: Jaxpr, var: Var) -> JaxprEqn | None:
    """Returns the cast of a variable to fewer bits if nothing else reads it, also in calls; else None."""
    if any(item is var for item in jaxpr.outvars):
        return None
    casts: list[JaxprEqn | None] = []
    for eqn in jaxpr.eqns:
        positions = [i for i, item in enumerate(eqn.invars) if item is var]
        if not positions:
            continue
        if eqn.primitive.name in PLAIN_CALLS:
            inner = _inner_jaxpr(eqn)
            casts += [_cast(inner, inner.invars[i]) for i in positions]
        else:
            casts.append(eqn if _is_narrower(eqn) else None)
    dtypes = {None if cast is None else cast.params["new_dtype"] for cast in casts}
    return casts[0] if len(dtypes) == 1 else None


def _is_narrower(eqn: JaxprEqn) -> bool:
    if eqn.primitive.name != "convert_element_type":
        return False
    (read,), after = shapes(eqn.invars), eqn.params["new_dtype"]
    before = read.dtype
    floats = jnp.issubdtype(before, jnp.floating) and jnp.issubdtype(after, jnp.floating)
    return floats and jnp.dtype(after).itemsize < before.itemsize


def _inner_jaxpr(eqn: JaxprEqn) -> Jaxpr:
    return unwrap_jaxpr(eqn.params.get("jaxpr", eqn.params.get("call_jaxpr")))


def _without_casts(inner: object, dtypes: Mapping[int, Any]) -> Any:
    """Returns a jaxpr, closed as `inner` is, some of whose inputs have other dtypes: those to which it casts them."""
    jaxpr = unwrap_jaxpr(inner)
    avals = shapes(jaxpr.invars)
    inputs = [jax.ShapeDtypeStruct(aval.shape, dtypes.get(i, aval.dtype)) for i, aval in enumerate(avals)]
    closed = jax.make_jaxpr(lambda *args: _run(jaxpr, jaxpr_consts(inner), args, dtypes))(*inputs)
    return closed if isinstance(inner, ClosedJaxpr) else closed.jaxpr


def _run(jaxpr: Jaxpr, consts: Sequence, args: Sequence, dtypes: Mapping[int, Any]) -> list:
    env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
    dtype_of = {jaxpr.invars[i]: dtype for i, dtype in dtypes.items()}
    for eqn in jaxpr.eqns:
        inputs = enumerate(eqn.invars)
        inner_dtypes = {i: dtype_of[var] for i, var in inputs if not isinstance(var, Literal) and var in dtype_of}
        if inner_dtypes and eqn.primitive.name == "convert_element_type":
            env[eqn.outvars[0]] = env[eqn.invars[0]]
        elif inner_dtypes:
            name = "jaxpr" if "jaxpr" in eqn.params else "call_jaxpr"
            env.run(eqn.replace(params={**eqn.params, name: _without_casts(eqn.params[name], inner_dtypes)}))
        else:
            env.run(eqn)
    return [env[var] for var in jaxpr.outvars]
