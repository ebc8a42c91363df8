"""Scans over layers whose backward makes elementwise results again, rather than keep a stack of each.

    as JAX differentiates them   forward scan ──► a stack of every value that is read ──► backward scan
    lean                         forward scan ──► stacks of the fewest bytes ──► backward scan, made again there

A stage of a pipeline keeps these stacks for every microbatch in flight. Values are those that JAX would keep, to the
bit. A scan with `jax.checkpoint` inside says itself what is kept, and is left as it is.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.pipeline.jaxprs.dataflow import REMAT, Env, Scan, after, parts, primitives, shapes, variables
from jaxpar.pipeline.jaxprs.fewest_kept import bytes_of, fewest_kept
from jaxpar.sharding.names import AGAIN


@dataclass(frozen=True, kw_only=True)
class Pair:
    """A scan forward, and the one backward that reads what it stacks.

    Attributes:
      forward: The one equation.
      backward: The other.
      dropped: Variables of the forward's body that were stacked, to variables of the backward's body that they are.
      kept: Variables of the forward's body that are stacked instead.
      again: Its equations that the backward runs, which make the dropped from the kept.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    dropped: dict[Var, list[Var]]
    kept: list[Var]
    again: list[JaxprEqn]


def lean(closed: ClosedJaxpr, x: Collection[Var]) -> ClosedJaxpr:
    """Returns a forward with its backward, in one jaxpr, whose scans keep less.

    Args:
      closed: Both; scans are equations of its own.
      x: Inputs that what is kept depends on; what does not depend on them is there without keeping.
    """
    jaxpr = closed.jaxpr
    pairs = _pairs(jaxpr, x)
    if not pairs:
        return closed

    def run(*args):
        env = Env(jaxpr, closed.consts, zip(jaxpr.invars, args, strict=True))
        stacks: dict[int, list] = {}
        for eqn in jaxpr.eqns:
            found = next((n for n, pair in enumerate(pairs) if eqn in (pair.forward, pair.backward)), None)
            if found is None:
                env.run(eqn)
                continue
            with _named(str(eqn.source_info.name_stack)):
                if eqn is pairs[found].forward:
                    stacks[found] = _run_forward(pairs[found], env)
                else:
                    _run_backward(pairs[found], env, stacks[found])
        return [env[var] for var in jaxpr.outvars]

    return jax.make_jaxpr(run)(*shapes(closed.in_avals))


def _pairs(jaxpr: Any, x: Collection[Var]) -> list[Pair]:
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    readers: dict[Var, list] = {}
    for eqn in jaxpr.eqns:
        for var in variables(eqn.invars):
            readers.setdefault(var, []).append(eqn)
    of_x, found = after(jaxpr.eqns, x), []
    for forward in scans:
        scan, stacks = Scan(forward), {}
        given = {*scan.body.invars[: scan.consts], *scan.body.invars[scan.consts + scan.carry :]}  # needs no keeping
        for outer, inner in zip(forward.outvars[scan.carry :], scan.body.outvars[scan.carry :], strict=True):
            read = readers.get(outer, [])
            plain = isinstance(inner, Literal) or inner in given or outer in jaxpr.outvars
            if len(read) == 1 and read[0] in scans and not plain:
                stacks[outer] = (inner, read[0])
        backwards = list({id(eqn): eqn for _, eqn in stacks.values()}.values())
        if len(backwards) == 1 and not any(backwards[0] is pair.backward for pair in found):
            pair = _pair(forward, backwards[0], {outer: inner for outer, (inner, _) in stacks.items()}, of_x)
            found += [] if pair is None else [pair]
    return found


def _pair(forward: JaxprEqn, backward: JaxprEqn, stacks: dict[Var, Var], of_x: Collection[Var]) -> Pair | None:
    one, other = Scan(forward), Scan(backward)
    if one.length != other.length or primitives([*one.body.eqns, *other.body.eqns]).intersection(REMAT):
        return None
    inner = list(zip(forward.invars, one.body.invars, strict=True))
    first = one.consts, one.consts + one.carry
    free = {var for n, (outer, var) in enumerate(inner) if not (_of(outer, of_x) or first[0] <= n < first[1])}
    free |= set(one.body.constvars)
    kept, again = fewest_kept(one.body.eqns, free, stacks.values())
    # what depends on x and is the same for all layers has no stack to be kept in
    if set(kept).intersection(one.body.invars[: one.consts]) or not _less(kept, stacks.values()):
        return None
    dropped: dict[Var, list[Var]] = {}
    for outer, var in zip(backward.invars, other.body.invars, strict=True):
        if not isinstance(outer, Literal) and outer in stacks:
            dropped.setdefault(stacks[outer], []).append(var)
    return Pair(forward=forward, backward=backward, dropped=dropped, kept=kept, again=again)


def _of(item: Any, some: Collection[Var]) -> bool:
    """Returns whether a variable is one of some; a literal is not, and cannot be asked for in a set."""
    return not isinstance(item, Literal) and item in some


def _less(kept: Collection[Var], before: Collection[Var]) -> bool:
    return sum(map(bytes_of, kept)) < sum(map(bytes_of, set(before)))


def _run_forward(pair: Pair, env: Env) -> list:
    """Runs the forward scan; returns the stacks of what is kept."""
    scan = Scan(pair.forward)
    consts, first, xs = parts([env[var] for var in pair.forward.invars], [scan.consts, scan.carry, scan.xs])
    outs = list(zip(pair.forward.outvars, scan.body.outvars, strict=True))[scan.carry :]
    others = [(outer, inner) for outer, inner in outs if not _of(inner, pair.dropped)]

    def step(carry, xs):
        inside = _inside(scan, [*consts, *carry, *xs])
        for eqn in scan.body.eqns:
            inside.run(eqn)
        carried = [inside[var] for var in scan.body.outvars[: scan.carry]]
        return carried, ([inside[var] for _, var in others], [inside[var] for var in pair.kept])

    last, (ys, kept) = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    env.update(zip(pair.forward.outvars, last, strict=False))
    env.update(zip([outer for outer, _ in others], ys, strict=True))
    return kept


def _run_backward(pair: Pair, env: Env, kept: Sequence) -> None:
    """Runs the backward scan, which makes again what is not kept."""
    one, scan = Scan(pair.forward), Scan(pair.backward)
    dropped = {var for each in pair.dropped.values() for var in each}
    inputs = list(zip(pair.backward.invars, scan.body.invars, strict=True))
    consts, carry, xs = parts(inputs, [scan.consts, scan.carry, scan.xs])
    xs = [(outer, inner) for outer, inner in xs if inner not in dropped]
    # of the forward's inputs what needs no keeping: its constants, and its stacks of parameters
    reads = {var for eqn in pair.again for var in variables(eqn.invars)} | set(pair.dropped)
    given = [(outer, inner) for outer, inner in zip(pair.forward.invars, one.body.invars, strict=True)]
    fixed = [(outer, inner) for outer, inner in given[: one.consts] if inner in reads]
    stacked = [(outer, inner) for outer, inner in given[one.consts + one.carry :] if inner in reads]

    def step(carried, each):
        xs_, stacked_, kept_ = each
        early = Env(one.body, one.body_consts, zip([inner for _, inner in stacked], stacked_, strict=True))
        early.update({inner: env[outer] for outer, inner in fixed})
        early.update(zip(pair.kept, kept_, strict=True))
        with jax.named_scope(AGAIN):
            for eqn in pair.again:
                early.run(eqn)
        late = Env(scan.body, scan.body_consts, [(inner, env[outer]) for outer, inner in consts])
        late.update(zip([inner for _, inner in carry], carried, strict=True))
        late.update(zip([inner for _, inner in xs], xs_, strict=True))
        late.update({var: early[of] for of, each in pair.dropped.items() for var in each})
        for eqn in scan.body.eqns:
            late.run(eqn)
        out = [late[var] for var in scan.body.outvars]
        return out[: scan.carry], out[scan.carry :]

    first = [env[outer] for outer, _ in carry]
    stacks = [env[outer] for outer, _ in xs], [env[outer] for outer, _ in stacked], list(kept)
    last, ys = jax.lax.scan(step, first, stacks, length=scan.length, reverse=scan.reverse)
    env.update(zip(pair.backward.outvars, [*last, *ys], strict=True))


def _inside(scan: Scan, values: Sequence) -> Env:
    return Env(scan.body, scan.body_consts, zip(scan.body.invars, values, strict=True))


def _named(scope: str):
    return jax.named_scope(scope) if scope else jax.named_scope("lean")
