"""Traces functions to jaxprs, and finds the dependencies between their equations.

`needed_equations` keeps all outputs of a scan. `PrunedJaxpr` reduces a scan to the needed carries, inputs and outputs,
so that a counter can be computed without state that depends on the layers' results:

    scan: x, count ──► layer ──► x', count + 1        count + 1 alone: a scan that carries no x
"""

from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import cached_property
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
    jaxprs_in_params,
)

REMAT = ("remat2", "checkpoint")  # releases of JAX name it differently
PLAIN_CALLS = ("jit", "pjit", "closed_call")
CALLS = (*PLAIN_CALLS, *REMAT)  # equations whose inner jaxpr can be inlined in their place
# prefixes of primitives whose bodies are not rewritten: custom gradients, islands, kernels
OPAQUE = ("custom_", "shard_map", "pallas_call")


class Traced:
    """A function of pytrees that is traced once to a jaxpr, and then called any number of times."""

    def __init__(self, function: Callable, *args: Any):
        flat, self.inputs = jax.tree.flatten(args)
        structures: list = []

        def run(*leaves):
            # a jaxpr has leaves only: the trace records the structure of the result
            out, tree = jax.tree.flatten(function(*jax.tree.unflatten(self.inputs, leaves)))
            structures.append(tree)
            return out

        self.closed = jax.make_jaxpr(run)(*flat)
        self.outputs = structures[-1]
        self._run = jaxpr_as_fun(self.closed)

    def __call__(self, *args: Any) -> Any:
        """Calls the function."""
        leaves, tree = jax.tree.flatten(args)
        # such a call is a bug in jaxpar, not the user's: leaves in another order would silently give wrong numbers
        if tree != self.inputs:
            raise TypeError(f"traced for {self.inputs}, called with {tree}")
        return jax.tree.unflatten(self.outputs, self._run(*leaves))

    @property
    def shapes(self) -> Any:
        """The shapes and dtypes of the result."""
        return jax.tree.unflatten(self.outputs, shapes(self.closed.out_avals))

    @cached_property
    def flat(self) -> ClosedJaxpr:
        """The jaxpr with all calls inlined, so that dependencies are known per operation."""
        return inline_calls(self._run, self.closed.in_avals)

    def reads(self) -> Any:
        """Returns a bool per leaf of the arguments, in their structure: whether the result depends on the leaf."""
        jaxpr = self.flat.jaxpr
        _, reads = needed_equations(jaxpr.eqns, jaxpr.outvars)
        return jax.tree.unflatten(self.inputs, [var in reads for var in jaxpr.invars])


def rewrite(function: Callable, change: Callable[[Jaxpr], Jaxpr]) -> Callable:
    """Wraps a function of pytrees of arrays: a call traces it, applies `change` to the jaxpr, and runs the result."""

    def run(*args: Any) -> Any:
        traced = Traced(function, *args)
        changed = ClosedJaxpr(change(traced.closed.jaxpr), traced.closed.consts)
        return jax.tree.unflatten(traced.outputs, jaxpr_as_fun(changed)(*jax.tree.leaves(args)))

    return run


def rewrite_param(value: object, change: Callable[[Jaxpr], Jaxpr]) -> Any:
    """Applies `change` to the jaxprs in an equation's parameter; returns the same object if nothing changes."""
    if isinstance(value, ClosedJaxpr):
        inner = change(value.jaxpr)
        return value if inner is value.jaxpr else ClosedJaxpr(inner, value.consts)
    if isinstance(value, Jaxpr):
        return change(value)
    if type(value) is tuple:
        items = tuple(rewrite_param(item, change) for item in value)
        return value if all(new is old for new, old in zip(items, value, strict=True)) else items
    return value


def needed_equations(eqns: Sequence[JaxprEqn], outs: Iterable) -> tuple[list[JaxprEqn], set[Var]]:
    """Returns the equations that compute these variables, in order, and all variables that they read."""
    # in reverse: an equation is needed if an output or a later needed equation reads its result
    reads, needed_eqns = variables(outs), []
    for eqn in reversed(eqns):
        if reads.intersection(eqn.outvars):
            needed_eqns.append(eqn)
            reads |= variables(eqn.invars)
    return needed_eqns[::-1], reads


def primitives(eqns: Sequence[JaxprEqn]) -> set[str]:
    """Returns the names of the primitives in these equations, including those in nested scans and calls."""
    names = {eqn.primitive.name for eqn in eqns}
    return names.union(*(primitives(inner.eqns) for eqn in eqns for inner in jaxprs_in_params(eqn.params)))


def dependent_variables(eqns: Sequence[JaxprEqn], inputs: Iterable) -> set[Var]:
    """Returns these inputs and all variables that depend on them."""
    dependents = variables(inputs)
    for eqn in eqns:
        if dependents.intersection(variables(eqn.invars)):
            dependents |= set(eqn.outvars)
    return dependents


def variables(items: Iterable) -> set[Var]:
    """Returns the items that are not literals."""
    return {item for item in items if not isinstance(item, Literal)}


def is_key(var: Any) -> bool:
    """Whether a variable holds PRNG keys."""
    return jnp.issubdtype(var.aval.dtype, jax.dtypes.prng_key)


def shapes(avals: Iterable[Any]) -> list[jax.ShapeDtypeStruct]:
    """Returns the shapes and dtypes of abstract values, or of variables."""
    abstract = (getattr(aval, "aval", aval) for aval in avals)
    return [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in abstract]


def replace_equations(jaxpr: Jaxpr, equations: Callable[[JaxprEqn], Iterable[JaxprEqn]]) -> Jaxpr:
    """Returns the jaxpr with each equation replaced by those given for it; the same object if none is replaced."""
    eqns = [new for eqn in jaxpr.eqns for new in equations(eqn)]
    unchanged = len(eqns) == len(jaxpr.eqns) and all(new is old for new, old in zip(eqns, jaxpr.eqns, strict=True))
    return jaxpr if unchanged else jaxpr.replace(eqns=eqns)


def subfunction(
    jaxpr: Jaxpr, consts: Sequence, ins: Sequence[Var], eqns: Sequence[JaxprEqn], outs: Sequence
) -> Callable:
    """Returns the function from `ins` to `outs` that these equations of a jaxpr compute."""

    def run(*args):
        env = Env(jaxpr, consts, zip(ins, args, strict=True))
        for eqn in eqns:
            env.run(eqn)
        return [env[var] for var in outs]

    return run


class Env(dict):
    """The values computed so far, by variable of a jaxpr."""

    def __init__(self, jaxpr: Jaxpr, consts: Sequence, values: Iterable):
        super().__init__(zip(jaxpr.constvars, consts, strict=True))
        self.jaxpr = jaxpr
        self.update(values)

    def __getitem__(self, var):
        return var.val if isinstance(var, Literal) else super().__getitem__(var)

    def __contains__(self, var):
        return isinstance(var, Literal) or super().__contains__(var)

    def run(self, eqn: JaxprEqn) -> None:
        """Computes one equation."""
        # evaluates a jaxpr of this one equation instead of binding its primitive: that preserves its named scope and
        # source line, by which the inspector explains the program, and needs no private API of JAX
        ins = list(dict.fromkeys(var for var in eqn.invars if not isinstance(var, Literal)))
        jaxpr = self.jaxpr.replace(constvars=(), invars=ins, outvars=list(eqn.outvars), eqns=[eqn])
        self.update(zip(eqn.outvars, jaxpr_as_fun(ClosedJaxpr(jaxpr, ()))(*(self[var] for var in ins)), strict=True))


def inline_calls(run: Callable, avals: Sequence, calls: Sequence[str] = CALLS) -> ClosedJaxpr:
    """Traces a function of arrays to a jaxpr with all calls inlined, also inside scans."""
    closed = jax.make_jaxpr(run)(*shapes(avals))
    return jax.make_jaxpr(lambda *args: _inline(closed.jaxpr, closed.consts, args, calls))(*closed.in_avals)


def _inline(jaxpr: Jaxpr, consts: Sequence, args: Sequence, calls: Sequence[str]) -> list:
    env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
    for eqn in jaxpr.eqns:
        name = eqn.primitive.name
        values = [env[var] for var in eqn.invars]
        if name in calls:
            inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
            scope = str(eqn.source_info.name_stack)  # scopes in the inner jaxpr begin at the call
            with jax.named_scope(scope) if scope else nullcontext():
                results = _inline(unwrap_jaxpr(inner), jaxpr_consts(inner), values, calls)
            env.update(zip(eqn.outvars, results, strict=True))
        elif name == "scan":
            env.update(zip(eqn.outvars, _inline_scan(Scan(eqn), values, calls), strict=True))
        else:
            env.run(eqn)
    return [env[var] for var in jaxpr.outvars]


def _inline_scan(scan: "Scan", values: list, calls: Sequence[str]) -> list:
    consts, first, xs = split_groups(values, [scan.consts, scan.carry, scan.xs])

    # inlines the body but keeps the scan, so that compile time does not grow with the layers
    def step(carry, xs):
        out = _inline(scan.body, scan.body_consts, [*consts, *carry, *xs], calls)
        return out[: scan.carry], out[scan.carry :]

    last, ys = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    return [*last, *ys]


class Scan:
    """A scan equation, with its numbers of constants, carries and stacked inputs (xs).

    This class derives the numbers from shapes, because releases of JAX name the equation's parameters differently: a
    stacked input or output has one dim more than in the body.
    """

    def __init__(self, eqn: JaxprEqn):
        self.eqn = eqn
        self.body, self.body_consts = unwrap_jaxpr(eqn.params["jaxpr"]), jaxpr_consts(eqn.params["jaxpr"])
        self.length, self.reverse = eqn.params["length"], eqn.params["reverse"]
        self.xs = sum(_is_stack(*pair) for pair in zip(eqn.invars, self.body.invars, strict=True))
        self.carry = sum(not _is_stack(*pair) for pair in zip(eqn.outvars, self.body.outvars, strict=True))
        self.consts = len(eqn.invars) - self.xs - self.carry


def _is_stack(outer, inner) -> bool:
    return len(outer.aval.shape) > len(inner.aval.shape)


def split_groups(items: Sequence, counts: Sequence[int]) -> list[list]:
    """Splits the items into consecutive groups of these sizes."""
    groups, start = [], 0
    for count in counts:
        groups.append(list(items[start : start + count]))
        start += count
    return groups


def unwrap_jaxpr(inner: Any) -> Jaxpr:
    """Returns the jaxpr in a parameter of an equation, closed or not."""
    return getattr(inner, "jaxpr", inner)


def jaxpr_consts(inner: object) -> Sequence:
    """Returns the constants of a closed jaxpr, or () for a jaxpr that is not closed."""
    return getattr(inner, "consts", ())


class PrunedJaxpr:
    """The part of a jaxpr that computes the selected outputs.

    Attributes:
      reads: The variables that it reads.
    """

    def __init__(self, jaxpr: Jaxpr, outs: Iterable):
        self.jaxpr, self.outs = jaxpr, list(outs)
        self.reads, self._run = variables(self.outs), []
        for eqn in reversed(jaxpr.eqns):
            if self.reads.intersection(eqn.outvars):
                step = _PrunedScan(eqn, self.reads) if eqn.primitive.name == "scan" else eqn
                self._run.append(step)
                self.reads |= variables(eqn.invars) if isinstance(step, JaxprEqn) else step.reads

    def __call__(self, consts: Sequence, values: dict[Var, Any]) -> list:
        """Computes the selected outputs, given the values of the inputs in `reads`."""
        env = Env(self.jaxpr, consts, values.items())
        for step in reversed(self._run):
            env.run(step) if isinstance(step, JaxprEqn) else step.run(env)
        return [env[var] for var in self.outs]


class _PrunedScan:
    """A scan with the needed carries, stacked inputs and stacked outputs only."""

    def __init__(self, eqn: JaxprEqn, wanted: set[Var]):
        self.scan, self.eqn = (scan := Scan(eqn)), eqn
        outs = {i for i, var in enumerate(eqn.outvars) if var in wanted}
        inputs = scan.body.invars
        while True:
            self.body = PrunedJaxpr(scan.body, [scan.body.outvars[i] for i in sorted(outs)])
            # a carry that the body reads is also needed, and so are its inputs
            carried = {i for i in range(scan.carry) if inputs[scan.consts + i] in self.body.reads}
            if carried <= outs:
                break
            outs |= carried
        self.outs = sorted(outs)
        self.ins = [i for i, var in enumerate(inputs) if var in self.body.reads or i - scan.consts in self._carries]
        self.reads = variables(eqn.invars[i] for i in self.ins)

    @property
    def _carries(self) -> list[int]:
        return [i for i in self.outs if i < self.scan.carry]

    def run(self, env: Env) -> None:
        """Computes the needed outputs."""
        scan, inputs = self.scan, self.scan.body.invars
        ends = scan.consts, scan.consts + scan.carry
        consts = {inputs[i]: env[self.eqn.invars[i]] for i in self.ins if i < ends[0]}
        first = [env[self.eqn.invars[scan.consts + i]] for i in self._carries]
        stacked = {i: env[self.eqn.invars[i]] for i in self.ins if i >= ends[1]}

        def step(carry, xs):
            values = consts | {inputs[scan.consts + i]: value for i, value in zip(self._carries, carry, strict=True)}
            out = self.body(scan.body_consts, values | {inputs[i]: value for i, value in xs.items()})
            return out[: len(carry)], out[len(carry) :]

        last, ys = jax.lax.scan(step, first, stacked, length=scan.length, reverse=scan.reverse)
        env.update(zip((self.eqn.outvars[i] for i in self.outs), [*last, *ys], strict=True))
