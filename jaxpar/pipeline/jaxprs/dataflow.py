"""Functions as jaxprs, and what in them depends on what."""

from collections.abc import Callable, Iterable, Sequence
from functools import cached_property
from typing import Any

import jax
from jax.extend.core import (
    ClosedJaxpr,  # pyright: ignore[reportPrivateImportUsage]
    Jaxpr,
    JaxprEqn,
    Literal,
    Var,
    jaxpr_as_fun,
    jaxprs_in_params,
)

REMAT = ("remat2", "checkpoint")  # releases of JAX name it differently
CALLS = ("jit", "pjit", "closed_call", *REMAT)  # what they hold is computed where they stand


class Traced:
    """A function of pytrees as a jaxpr: traced once, run in as many places as it is wanted."""

    def __init__(self, function: Callable, *args: Any):
        flat, self.inputs = jax.tree.flatten(args)
        structures: list = []

        def run(*leaves):
            out, tree = jax.tree.flatten(function(*jax.tree.unflatten(self.inputs, leaves)))
            structures.append(tree)
            return out

        self.closed = jax.make_jaxpr(run)(*flat)
        self.outputs = structures[-1]
        self._run = jaxpr_as_fun(self.closed)

    def __call__(self, *args: Any) -> Any:
        """Returns what the function returns."""
        leaves, tree = jax.tree.flatten(args)
        if tree != self.inputs:
            raise TypeError(f"traced for {self.inputs}, called with {tree}")
        return jax.tree.unflatten(self.outputs, self._run(*leaves))

    @property
    def shapes(self) -> Any:
        """The shapes and dtypes that it returns."""
        return jax.tree.unflatten(self.outputs, shapes(self.closed.out_avals))

    @cached_property
    def flat(self) -> ClosedJaxpr:
        """The jaxpr without calls: what depends on what can be read off it."""
        return inlined(self._run, self.closed.in_avals)

    def reads(self) -> Any:
        """Returns, in the structure of the arguments, which leaves what it returns depends on."""
        jaxpr = self.flat.jaxpr
        _, read = needed(jaxpr.eqns, jaxpr.outvars)
        return jax.tree.unflatten(self.inputs, [var in read for var in jaxpr.invars])


def needed(eqns: Sequence[JaxprEqn], outs: Iterable) -> tuple[list[JaxprEqn], set[Var]]:
    """Returns the equations that these variables follow from, in order, and every variable that is read for it."""
    reads, kept = variables(outs), []
    for eqn in reversed(eqns):
        if reads.intersection(eqn.outvars):
            kept.append(eqn)
            reads |= variables(eqn.invars)
    return kept[::-1], reads


def primitives(eqns: Sequence[JaxprEqn]) -> set[str]:
    """Returns the names of what these equations do, inside of their scans and calls too."""
    found = {eqn.primitive.name for eqn in eqns}
    return found.union(*(primitives(inner.eqns) for eqn in eqns for inner in jaxprs_in_params(eqn.params)))


def after(eqns: Sequence[JaxprEqn], inputs: Iterable) -> set[Var]:
    """Returns every variable that follows from these."""
    found = variables(inputs)
    for eqn in eqns:
        if found.intersection(variables(eqn.invars)):
            found |= set(eqn.outvars)
    return found


def variables(items: Iterable) -> set[Var]:
    """Returns what is no literal."""
    return {item for item in items if not isinstance(item, Literal)}


def shapes(avals: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns abstract values, or variables of them, as shapes and dtypes."""
    each = (getattr(aval, "aval", aval) for aval in avals)
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in each]


def function(jaxpr: Jaxpr, consts: Sequence, ins: Sequence[Var], eqns: Sequence[JaxprEqn], outs: Sequence) -> Callable:
    """Returns the function of `ins` that these equations of a jaxpr are."""

    def run(*args):
        env = Env(jaxpr, consts, zip(ins, args, strict=True))
        for eqn in eqns:
            env.run(eqn)
        return [env[var] for var in outs]

    return run


class Env(dict):
    """The values of the variables of a jaxpr, as far as they are known."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence, values: Iterable):
        super().__init__(zip(jaxpr.constvars, consts, strict=True))
        self.jaxpr = jaxpr
        self.update(values)

    def __getitem__(self, var):
        return var.val if isinstance(var, Literal) else super().__getitem__(var)

    def __contains__(self, var):
        return isinstance(var, Literal) or super().__contains__(var)

    def run(self, eqn: JaxprEqn) -> None:
        """Computes one equation, in the scope it was written in."""
        ins = list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, Literal)))
        alone = self.jaxpr.replace(constvars=(), invars=ins, outvars=list(eqn.outvars), eqns=[eqn])
        self.update(zip(eqn.outvars, jaxpr_as_fun(ClosedJaxpr(alone, ()))(*(self[var] for var in ins)), strict=True))


def inlined(run: Callable, avals: Sequence) -> ClosedJaxpr:
    """Returns a function of arrays as a jaxpr without calls, inside its scans too."""
    closed = jax.make_jaxpr(run)(*shapes(avals))
    return jax.make_jaxpr(lambda *args: _inline(closed.jaxpr, closed.consts, args))(*closed.in_avals)


def _inline(jaxpr: Jaxpr, consts: Sequence, args: Sequence) -> list:
    env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        values = [env[var] for var in eqn.invars]
        if name in CALLS:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            env.update(zip(eqn.outvars, _inline(jaxpr_of(inner), consts_of(inner), values), strict=True))
        elif name == "scan":
            env.update(zip(eqn.outvars, _inline_scan(Scan(eqn), values), strict=True))
        else:
            env.run(eqn)
    return [env[var] for var in jaxpr.outvars]


def _inline_scan(scan: "Scan", values: list) -> list:
    consts, first, xs = parts(values, [scan.consts, scan.carry, scan.xs])

    def step(carry, xs):
        out = _inline(scan.body, scan.body_consts, [*consts, *carry, *xs])
        return out[: scan.carry], out[scan.carry :]

    last, ys = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    return [*last, *ys]


class Scan:
    """A scan equation. Which of its inputs are constants, carries and stacks is read off the shapes:

    releases of JAX name it differently.
    """

    def __init__(self, eqn: JaxprEqn):
        self.eqn = eqn
        self.body, self.body_consts = jaxpr_of(eqn.params["jaxpr"]), consts_of(eqn.params["jaxpr"])
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        self.xs = sum(_is_stack(*pair) for pair in zip(eqn.invars, self.body.invars, strict=True))
        self.carry = sum(not _is_stack(*pair) for pair in zip(eqn.outvars, self.body.outvars, strict=True))
        self.consts = len(eqn.invars) - self.xs - self.carry


def _is_stack(outer, inner) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def parts(items: Sequence, counts: Sequence[int]) -> list[list]:
    """Returns the items in groups of these sizes."""
    groups, at = [], 0
    for count in counts:
        groups.append(list(items[at : at + count]))
        at += count
    return groups


def jaxpr_of(inner: Any) -> Jaxpr:
    """Returns the jaxpr of a parameter that holds one, closed or not."""
    return getattr(inner, "jaxpr", inner)


def consts_of(inner: Any) -> Sequence:
    """Returns its constants."""
    return getattr(inner, "consts", ())
