"""Keeps the gradient of a weight that a loop reads in each iteration whole until the loop has ended.

    by default   loop over tokens: + gradient of an iteration ─► reduce-scatter      a reduce-scatter per iteration
    kept whole   loop over tokens: + gradient of an iteration ─► loop ends ─► reduce-scatter

The weight of a recurrent cell is such a weight. JAX adds its gradients up in a carry of the backward scan. Where the
result is constrained to shards, XLA shards the carry as well, and reduces every iteration: an LSTM of 128 tokens sent
111 times the bytes over fsdp 8. The carry is whole instead, in the dtype in which JAX sums: it takes as many bytes as
the weight, which the loop reads whole anyway, or twice as many if it reads it in 16 bits.
"""

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Literal
from jax.sharding import NamedSharding, PartitionSpec

from jaxpar.jaxprs.dataflow import (
    CALLS,
    Env,
    Scan,
    replace_equations,
    rewrite,
    rewrite_param,
    shapes,
    unwrap_jaxpr,
    variables,
)
from jaxpar.jaxprs.gradient_sums import FREE, constraint_axes
from jaxpar.models.dim_names import spec_axes

ADDS = ("add_any",)  # the primitive by which JAX adds gradients
SAME_ENTRIES = ("transpose", "reshape", "convert_element_type", "squeeze", "expand_dims", "copy", "mul", "neg")
LINEAR = (*SAME_ENTRIES, *ADDS, "sharding_constraint")


def keep_accumulated_whole(function: Callable, axes: Collection[str], count: int) -> Callable:
    """Rewrites a function: gradients that its loops accumulate are constrained to shards over `axes` after the loop.

    Constraints of activations, and of their gradients, stay: their batch is split over the same axes.

    Args:
      function: Computes gradients of pytrees of arrays, and constrains them to shards.
      axes: The mesh axes.
      count: Number of leaves of the result that are gradients of parameters: its first ones.
    """
    return rewrite(function, lambda jaxpr: _keep_whole(jaxpr, jaxpr.outvars[:count], axes=frozenset(axes)))


def _entries(jaxpr: Jaxpr, gradients: Sequence[object], carry: Sequence[object]) -> set[Any]:
    """Returns the variables whose entries are those of these gradients, or of terms of them."""
    found = variables(gradients)
    for eqn in reversed(jaxpr.eqns):
        if eqn.primitive.name in LINEAR and found.intersection(eqn.outvars):
            found |= variables(eqn.invars).difference(carry)
    return found


def _keep_whole(jaxpr: Jaxpr, gradients: Sequence[object], axes: frozenset[str], carry: Sequence[object] = ()) -> Jaxpr:
    """Rewrites a jaxpr and those inside of it.

    Args:
      jaxpr: The jaxpr.
      gradients: Its results that are gradients of parameters, or terms of them.
      axes: The mesh axes.
      carry: If it is the body of a scan, the inputs that it carries.
    """
    entries = _entries(jaxpr, gradients, carry)
    producers = {var: eqn for eqn in jaxpr.eqns for var in eqn.outvars}
    added = {id(eqn) for var, out in zip(carry, jaxpr.outvars, strict=False) for eqn in _addends(var, out, producers)}

    def replaced(eqn: JaxprEqn) -> list[JaxprEqn]:
        if not entries.intersection(eqn.outvars):
            return [eqn]
        if axes & {*constraint_axes(eqn)}:
            accumulated = _is_accumulated(eqn.invars[0], producers)
            return [_constraint(eqn, axes, shards=id(eqn) not in added)] if id(eqn) in added or accumulated else [eqn]
        scan = Scan(eqn) if eqn.primitive.name == "scan" else None
        carried = scan.body.invars[scan.consts : scan.consts + scan.carry] if scan else ()
        numbers = [number for number, var in enumerate(eqn.outvars) if var in entries]

        def change(inner: Jaxpr) -> Jaxpr:
            if len(inner.outvars) != len(eqn.outvars):  # the condition of a loop
                return inner
            return _keep_whole(inner, [inner.outvars[number] for number in numbers], axes, carried)

        params = {key: rewrite_param(value, change) for key, value in eqn.params.items()}
        if all(value is eqn.params[key] for key, value in params.items()):
            return [eqn]
        new = eqn.replace(params=params)
        shardings = {number: _sharding_of_addend(scan, number, axes) for number in numbers} if scan else {}
        found = {number: sharding for number, sharding in shardings.items() if sharding is not None}
        return [_constrained_results(jaxpr, new, found, axes) if found else new]

    return replace_equations(jaxpr, replaced)


def _constraint(eqn: JaxprEqn, axes: frozenset[str], *, shards: bool) -> JaxprEqn:
    """Replaces a sharding constraint by one without these axes; `shards` adds the original constraint after it."""
    sharding: NamedSharding = eqn.params["sharding"]
    whole = _whole_sharding(sharding, axes)

    def constrained(x: jax.Array) -> jax.Array:
        x = jax.lax.with_sharding_constraint(x, whole)
        return jax.lax.with_sharding_constraint(x, sharding) if shards else x

    (call,) = jax.make_jaxpr(jax.jit(constrained))(*shapes(eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _sharding_of_addend(scan: Scan, index: int, axes: frozenset[str]) -> NamedSharding | None:
    """Returns the sharding over these axes of what a body adds to a carry, if it has the carry's shape; else None."""
    if index >= scan.carry:
        return None
    producers = {var: eqn for eqn in scan.body.eqns for var in eqn.outvars}
    carry, pending = scan.body.invars[scan.consts + index], [scan.body.outvars[index]]
    if not _adds_to(carry, pending[0], producers):
        return None
    while pending:
        var = pending.pop()
        if isinstance(var, Literal) or (eqn := producers.get(var)) is None:
            continue
        if axes & {*constraint_axes(eqn)}:
            return eqn.params["sharding"]
        if eqn.primitive.name in ("add_any", "convert_element_type", "copy"):
            pending += eqn.invars
    return None


def _constrained_results(
    jaxpr: Jaxpr, eqn: JaxprEqn, shardings: Mapping[int, NamedSharding], axes: frozenset[str]
) -> JaxprEqn:
    """Returns an equation whose results with these numbers are whole over the axes, and then shards.

    In a loop over layers no other constraint follows: only the stack of all layers' gradients has one.
    """

    def run(*args: jax.Array) -> list[jax.Array]:
        pairs = [pair for pair in zip(eqn.invars, args, strict=True) if not isinstance(pair[0], Literal)]
        env = Env(jaxpr.replace(constvars=()), (), pairs)
        env.run(eqn)
        results = [env[var] for var in eqn.outvars]
        for number, sharding in shardings.items():
            whole = jax.lax.with_sharding_constraint(results[number], _whole_sharding(sharding, axes))
            results[number] = jax.lax.with_sharding_constraint(whole, sharding)
        return results

    (call,) = jax.make_jaxpr(jax.jit(run))(*shapes(eqn.invars)).eqns
    return call.replace(invars=eqn.invars, outvars=eqn.outvars, source_info=eqn.source_info)


def _whole_sharding(sharding: NamedSharding, axes: frozenset[str]) -> NamedSharding:
    """Returns a sharding without these axes; dims that are left to XLA stay so."""
    kept = (
        entry if entry is FREE else tuple(axis for axis in spec_axes(entry) if axis not in axes) or None
        for entry in sharding.spec
    )
    return NamedSharding(sharding.mesh, PartitionSpec(*kept))


def _addends(carry: object, out: object, producers: Mapping[Any, JaxprEqn]) -> Iterator[JaxprEqn]:
    """Yields the equations that compute what the body of a loop adds to a carry from an array of as many entries."""
    if not _adds_to(carry, out, producers):
        return
    pending = [out]
    while pending:
        if (eqn := producers.get(pending.pop())) is None or eqn.primitive.name not in LINEAR:
            continue
        yield eqn
        pending += [var for var in eqn.invars if not isinstance(var, Literal) and var is not carry]


def _is_accumulated(var: Any, producers: Mapping[Any, JaxprEqn]) -> bool:
    """Whether an array has the entries of a sum that a loop accumulates, or is a sum with such an array."""
    if isinstance(var, Literal) or (eqn := producers.get(var)) is None:
        return False
    name = eqn.primitive.name
    if name == "scan":
        scan, index = Scan(eqn), eqn.outvars.index(var)
        inner = {out: each for each in scan.body.eqns for out in each.outvars}
        return index < scan.carry and _adds_to(scan.body.invars[scan.consts + index], scan.body.outvars[index], inner)
    if name in CALLS:
        inner = next(unwrap_jaxpr(eqn.params[key]) for key in ("jaxpr", "call_jaxpr") if key in eqn.params)
        return _is_accumulated(inner.outvars[eqn.outvars.index(var)], {v: e for e in inner.eqns for v in e.outvars})
    operands = eqn.invars if name in (*ADDS, "mul") else eqn.invars[:1] if name in SAME_ENTRIES else ()
    return any(_is_accumulated(operand, producers) for operand in operands)


def _adds_to(carry: object, out: object, producers: Mapping[Any, JaxprEqn]) -> bool:
    """Whether a result of the body of a loop is the sum of a carry and other terms.

    In this way JAX adds up the gradient of an array that all iterations read.
    """
    while not isinstance(out, Literal) and (eqn := producers.get(out)) is not None and eqn.primitive.name in ADDS:
        if carry in eqn.invars:
            return True
        out = next((each for each in eqn.invars if not isinstance(each, Literal) and each in producers), None)
    return False
