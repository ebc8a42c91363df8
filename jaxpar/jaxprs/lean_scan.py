"""Scans over layers whose backward recomputes elementwise results, instead of saving a stack of each.

    as JAX differentiates them   forward scan ──► a stack of every residual ──► backward scan
    lean                         forward scan ──► stacks of the fewest bytes ──► backward scan that recomputes the rest

A stage of a pipeline saves these stacks for every microbatch in flight. The recomputed values equal JAX's residuals bit
for bit. A scan with `jax.checkpoint` inside has its own policy, and is unchanged.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import jax
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, Var  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.jaxprs.dataflow import REMAT, Env, Scan, after, primitives, shapes, split_groups, variables
from jaxpar.jaxprs.min_cut import bytes_of, smallest_residuals
from jaxpar.sharding.names import AGAIN


@dataclass(frozen=True, kw_only=True)
class ScanPair:
    """A forward scan, and the one backward scan that reads its stacked outputs.

    Attributes:
      forward: The equation of the forward scan.
      backward: The equation of the backward scan.
      dropped: Variables of the forward's body that are no longer saved, to their variables in the backward's body.
      saved: Variables of the forward's body that are saved instead.
      recomputed: Equations of the forward's body that the backward runs to compute the dropped from the saved values.
    """

    forward: JaxprEqn
    backward: JaxprEqn
    dropped: dict[Var, list[Var]]
    saved: list[Var]
    recomputed: list[JaxprEqn]


def lean_scans(closed: ClosedJaxpr, x: Collection[Var]) -> ClosedJaxpr:
    """Rewrites a joint jaxpr of forward and backward so that its scans save fewer bytes.

    Args:
      closed: The joint jaxpr, in which scans are top-level equations.
      x: Inputs that residuals may depend on; values independent of them need not be saved.
    """
    jaxpr = closed.jaxpr
    pairs = _pairs(jaxpr, x)
    if not pairs:
        return closed

    def run(*args):
        env = Env(jaxpr, closed.consts, zip(jaxpr.invars, args, strict=True))
        stacks: dict[int, list] = {}
        for eqn in jaxpr.eqns:
            index = next((n for n, pair in enumerate(pairs) if eqn in (pair.forward, pair.backward)), None)
            if index is None:
                env.run(eqn)
                continue
            with _scope(str(eqn.source_info.name_stack)):
                if eqn is pairs[index].forward:
                    stacks[index] = _run_forward(pairs[index], env)
                else:
                    _run_backward(pairs[index], env, stacks[index])
        return [env[var] for var in jaxpr.outvars]

    return jax.make_jaxpr(run)(*shapes(closed.in_avals))


def _pairs(jaxpr: Jaxpr, x: Collection[Var]) -> list[ScanPair]:
    scans = [eqn for eqn in jaxpr.eqns if eqn.primitive.name == "scan"]
    readers: dict[Var, list] = {}
    for eqn in jaxpr.eqns:
        for var in variables(eqn.invars):
            readers.setdefault(var, []).append(eqn)
    of_x, pairs = after(jaxpr.eqns, x), []
    for forward in scans:
        scan, stacks = Scan(forward), {}
        free = {*scan.body.invars[: scan.consts], *scan.body.invars[scan.consts + scan.carry :]}  # never saved
        for outer, inner in zip(forward.outvars[scan.carry :], scan.body.outvars[scan.carry :], strict=True):
            reading_eqns = readers.get(outer, [])
            plain = isinstance(inner, Literal) or inner in free or outer in jaxpr.outvars
            if len(reading_eqns) == 1 and reading_eqns[0] in scans and not plain:
                stacks[outer] = (inner, reading_eqns[0])
        backwards = list({id(eqn): eqn for _, eqn in stacks.values()}.values())
        if len(backwards) == 1 and not any(backwards[0] is pair.backward for pair in pairs):
            pair = _pair(forward, backwards[0], {outer: inner for outer, (inner, _) in stacks.items()}, of_x)
            pairs += [] if pair is None else [pair]
    return pairs


def _pair(forward: JaxprEqn, backward: JaxprEqn, stacks: dict[Var, Var], of_x: Collection[Var]) -> ScanPair | None:
    fwd, bwd = Scan(forward), Scan(backward)
    if fwd.length != bwd.length or primitives([*fwd.body.eqns, *bwd.body.eqns]).intersection(REMAT):
        return None
    inner = list(zip(forward.invars, fwd.body.invars, strict=True))
    first = fwd.consts, fwd.consts + fwd.carry
    free = {var for n, (outer, var) in enumerate(inner) if not (_is_in(outer, of_x) or first[0] <= n < first[1])}
    free |= set(fwd.body.constvars)
    saved, recomputed = smallest_residuals(fwd.body.eqns, free, stacks.values())
    # a value that depends on x and is the same for all layers has no stack to be saved in
    if set(saved).intersection(fwd.body.invars[: fwd.consts]) or not _less(saved, stacks.values()):
        return None
    dropped: dict[Var, list[Var]] = {}
    for outer, var in zip(backward.invars, bwd.body.invars, strict=True):
        if not isinstance(outer, Literal) and outer in stacks:
            dropped.setdefault(stacks[outer], []).append(var)
    return ScanPair(forward=forward, backward=backward, dropped=dropped, saved=saved, recomputed=recomputed)


def _is_in(item: Var | Literal, some: Collection[Var]) -> bool:
    """Whether a variable is in a collection; False for a literal, which is not hashable."""
    return not isinstance(item, Literal) and item in some


def _less(kept: Collection[Var], before: Collection[Var]) -> bool:
    return sum(map(bytes_of, kept)) < sum(map(bytes_of, set(before)))


def _run_forward(pair: ScanPair, env: Env) -> list:
    """Runs the forward scan; returns the stacks of the saved variables."""
    scan = Scan(pair.forward)
    consts, first, xs = split_groups([env[var] for var in pair.forward.invars], [scan.consts, scan.carry, scan.xs])
    outs = list(zip(pair.forward.outvars, scan.body.outvars, strict=True))[scan.carry :]
    plain_outs = [(outer, inner) for outer, inner in outs if not _is_in(inner, pair.dropped)]

    def step(carry, xs):
        body_env = _body_env(scan, [*consts, *carry, *xs])
        for eqn in scan.body.eqns:
            body_env.run(eqn)
        carried = [body_env[var] for var in scan.body.outvars[: scan.carry]]
        return carried, ([body_env[var] for _, var in plain_outs], [body_env[var] for var in pair.saved])

    last, (ys, saved) = jax.lax.scan(step, first, xs, length=scan.length, reverse=scan.reverse)
    env.update(zip(pair.forward.outvars, last, strict=False))
    env.update(zip([outer for outer, _ in plain_outs], ys, strict=True))
    return saved


def _run_backward(pair: ScanPair, env: Env, kept: Sequence) -> None:
    """Runs the backward scan, which recomputes the dropped variables."""
    fwd, scan = Scan(pair.forward), Scan(pair.backward)
    dropped = {var for items in pair.dropped.values() for var in items}
    inputs = list(zip(pair.backward.invars, scan.body.invars, strict=True))
    consts, carry, xs = split_groups(inputs, [scan.consts, scan.carry, scan.xs])
    xs = [(outer, inner) for outer, inner in xs if inner not in dropped]
    # the inputs of the forward that need no saving: its constants, and its stacks of parameters
    reads = {var for eqn in pair.recomputed for var in variables(eqn.invars)} | set(pair.dropped)
    inputs_fwd = [(outer, inner) for outer, inner in zip(pair.forward.invars, fwd.body.invars, strict=True)]
    fixed = [(outer, inner) for outer, inner in inputs_fwd[: fwd.consts] if inner in reads]
    stacked = [(outer, inner) for outer, inner in inputs_fwd[fwd.consts + fwd.carry :] if inner in reads]

    def step(carried, items):
        xs_, stacked_, kept_ = items
        env_fwd = Env(fwd.body, fwd.body_consts, zip([inner for _, inner in stacked], stacked_, strict=True))
        env_fwd.update({inner: env[outer] for outer, inner in fixed})
        env_fwd.update(zip(pair.saved, kept_, strict=True))
        with jax.named_scope(AGAIN):
            for eqn in pair.recomputed:
                env_fwd.run(eqn)
        env_bwd = Env(scan.body, scan.body_consts, [(inner, env[outer]) for outer, inner in consts])
        env_bwd.update(zip([inner for _, inner in carry], carried, strict=True))
        env_bwd.update(zip([inner for _, inner in xs], xs_, strict=True))
        env_bwd.update({var: env_fwd[source] for source, items in pair.dropped.items() for var in items})
        for eqn in scan.body.eqns:
            env_bwd.run(eqn)
        out = [env_bwd[var] for var in scan.body.outvars]
        return out[: scan.carry], out[scan.carry :]

    first = [env[outer] for outer, _ in carry]
    stacks = [env[outer] for outer, _ in xs], [env[outer] for outer, _ in stacked], list(kept)
    last, ys = jax.lax.scan(step, first, stacks, length=scan.length, reverse=scan.reverse)
    env.update(zip(pair.backward.outvars, [*last, *ys], strict=True))


def _body_env(scan: Scan, values: Sequence) -> Env:
    return Env(scan.body, scan.body_consts, zip(scan.body.invars, values, strict=True))


def _scope(scope: str):
    return jax.named_scope(scope) if scope else jax.named_scope("lean")
