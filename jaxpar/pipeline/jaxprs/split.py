"""Splits a computation into two halves: the equations that some outputs need, and all others.

    B   the equations that the gradient of the input needs
    W   the others; the values of B that they read cross from B to W

Nothing is computed twice: B and W together have the matmuls of the whole. A scan over layers becomes two scans, and
its crossing values are stacked. An equation that both halves need belongs to B.

The tables that run them apart: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.pipeline.jaxprs.dataflow import Env, Scan, needed, variables


@dataclass(frozen=True, kw_only=True)
class Loop:
    """A scan cut in two: the outputs and equations of both halves, and the values that cross between them.

    Attributes:
      carries: Carries of the first half.
      ys: Stacked outputs of the first half.
      body: Equations of the first half.
      late_carries: Carries of the second half.
      late_ys: Stacked outputs of the second half.
      late_body: Equations of the second half.
      crossing: Variables of the body that the first half stacks for the second.
    """

    carries: list[int]
    ys: list[int]
    body: list[JaxprEqn]
    late_carries: list[int] = field(default_factory=list)
    late_ys: list[int] = field(default_factory=list)
    late_body: list[JaxprEqn] = field(default_factory=list)
    crossing: list = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class Cut:
    """A jaxpr in two halves: `first` computes some outputs, `second` the others from the values that cross."""

    closed: ClosedJaxpr
    outs: list[int]
    again: int
    whole: frozenset[int]  # equations of the first half
    late: frozenset[int]  # equations of the second half
    loops: dict[int, Loop]  # scans of the first half; those in `late` too run in both halves
    crossing: list

    @staticmethod
    def of(closed: ClosedJaxpr, *, first: Iterable[int], again: int) -> "Cut":
        """Returns the cut.

        Args:
          closed: The jaxpr.
          first: Indices of the outputs that the first half computes.
          again: How many of the first inputs both halves are given, so that they need not cross.
        """
        jaxpr, outs = closed.jaxpr, list(first)
        # backwards from the early outputs: an equation that makes a needed variable is early, and needs its inputs
        need = variables(jaxpr.outvars[i] for i in outs)
        whole, loops, early_vars = set(), {}, set(jaxpr.invars)
        for i in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[i]
            if not need.intersection(eqn.outvars):
                continue
            if eqn.primitive.name == "scan":
                scan = _Scan(eqn)
                loops[i], inputs = scan.first_half({n for n, var in enumerate(eqn.outvars) if var in need})
                early_vars.update(eqn.outvars[n] for n in (*loops[i].carries, *(scan.carry + y for y in loops[i].ys)))
            else:
                whole.add(i)
                early_vars.update(eqn.outvars)
                inputs = eqn.invars
            need |= variables(inputs)
        # backwards from the other outputs, stopping at variables that the first half has already computed
        late: set[int] = set()
        need = variables(var for n, var in enumerate(jaxpr.outvars) if n not in outs)
        for i in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[i]
            wanted = {n for n, var in enumerate(eqn.outvars) if var in need and var not in early_vars}
            if not wanted:
                continue
            late.add(i)
            if i in loops:
                loops[i], inputs = _Scan(eqn).second_half(wanted, loops[i])
            else:
                inputs = eqn.invars
            need |= variables(inputs)
        # in the order of the jaxpr, not of a set: the stash must have the same layout in every trace
        there = set(jaxpr.invars[:again])
        order = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
        crossing = [var for var in order if var in need and var in early_vars and var not in there]
        return Cut(
            closed=closed,
            outs=outs,
            again=again,
            whole=frozenset(whole),
            late=frozenset(late),
            loops=loops,
            crossing=crossing,
        )

    def first(self, args: Sequence) -> tuple[list, list]:
        """Returns the early outputs, and the values that cross."""
        jaxpr = self.closed.jaxpr
        env = Env(jaxpr, self.closed.consts, zip(jaxpr.invars, args, strict=True))
        stacks: list = []
        for i, eqn in enumerate(jaxpr.eqns):
            if i in self.whole:
                env.run(eqn)
            elif i in self.loops:
                stacks += _Scan(eqn).run_first(env, self.loops[i])
        return [env[jaxpr.outvars[i]] for i in self.outs], [env[var] for var in self.crossing] + stacks

    def second(self, args: Sequence, stash: Sequence) -> list:
        """Returns the other outputs."""
        jaxpr = self.closed.jaxpr
        # `args` are the first `again` inputs; the stash is the crossing values, then the stacks of each scan in order
        env = Env(jaxpr, self.closed.consts, zip(jaxpr.invars, args, strict=False))
        env.update(zip(self.crossing, stash, strict=False))
        at = len(self.crossing)
        for i, eqn in enumerate(jaxpr.eqns):
            if i in self.loops:
                count = len(self.loops[i].crossing)
                if i in self.late:
                    _Scan(eqn).run_second(env, self.loops[i], stash[at : at + count])
                at += count
            elif i in self.late:
                env.run(eqn)
        return [env[var] for n, var in enumerate(jaxpr.outvars) if n not in self.outs]


class _Scan(Scan):
    """A scan equation that is cut."""

    def _carry_in(self, n: int):
        return self.body.invars[self.consts + n]

    def first_half(self, wanted: set[int]) -> tuple[Loop, list]:
        """Returns the loop that computes these outputs, and the outer variables that it reads."""
        carries = {n for n in wanted if n < self.carry}
        # a carry that is read in one turn must be computed in the turn before: repeated until no more are needed
        while True:
            outs = [self.body.outvars[n] for n in wanted | carries]
            body, reads = needed(self.body.eqns, outs)
            more = {n for n in range(self.carry) if self._carry_in(n) in reads} - carries
            if not more:
                break
            carries |= more
        ys = sorted(n - self.carry for n in wanted if n >= self.carry)
        inputs = [outer for outer, inner in zip(self.eqn.invars, self.body.invars, strict=True) if inner in reads]
        inputs += [self.eqn.invars[self.consts + n] for n in carries]
        return Loop(carries=sorted(carries), ys=ys, body=body), inputs

    def second_half(self, wanted: set[int], loop: Loop) -> tuple[Loop, list]:
        """Returns the loop with its second half, which computes the other outputs, and the outer variables it reads."""
        made = {var for eqn in loop.body for var in eqn.outvars} | {self._carry_in(n) for n in loop.carries}
        rest = [eqn for eqn in self.body.eqns if not any(eqn is other for other in loop.body)]
        carries = {n for n in wanted if n < self.carry}
        while True:
            body, reads = needed(rest, [self.body.outvars[n] for n in wanted | carries])
            more = {n for n in range(self.carry) if self._carry_in(n) in reads} - carries - set(loop.carries)
            if not more:
                break
            carries |= more
        order = [*self.body.invars, *(var for eqn in self.body.eqns for var in eqn.outvars)]
        cut = Loop(
            carries=loop.carries,
            ys=loop.ys,
            body=loop.body,
            late_carries=sorted(carries),
            late_ys=sorted(n - self.carry for n in wanted if n >= self.carry),
            late_body=body,
            crossing=[var for var in order if var in reads and var in made],
        )
        outside = [
            outer for outer, inner in zip(self.eqn.invars, self.body.invars, strict=True)
            if inner in reads and inner not in made
        ]  # fmt: skip
        return cut, outside + [self.eqn.invars[self.consts + n] for n in carries]

    def run_first(self, env: "Env", loop: Loop) -> list:
        """Runs the first half; its outputs go to the environment, the crossing values are returned stacked."""
        outs = [self.body.outvars[self.carry + n] for n in loop.ys] + loop.crossing
        ys = self._run(env, loop.body, loop.carries, outs, {})
        for n, value in zip(loop.ys, ys, strict=False):
            env[self.eqn.outvars[self.carry + n]] = value
        return ys[len(loop.ys) :]

    def run_second(self, env: "Env", loop: Loop, stacks: Sequence) -> None:
        """Runs the second half; its outputs go to the environment."""
        outs = [self.body.outvars[self.carry + n] for n in loop.late_ys]
        ys = self._run(env, loop.late_body, loop.late_carries, outs, dict(zip(loop.crossing, stacks, strict=True)))
        for n, value in zip(loop.late_ys, ys, strict=True):
            env[self.eqn.outvars[self.carry + n]] = value

    def _run(self, env: "Env", body: Sequence[JaxprEqn], carries: Sequence[int], outs: list, stacked: dict) -> list:
        inputs = list(zip(self.eqn.invars, self.body.invars, strict=True))
        # only inputs that this half has: x and g reach the second half only where they cross
        fixed = {inner: env[outer] for outer, inner in inputs[: self.consts] if outer in env}
        each = {inner: env[outer] for outer, inner in inputs[self.consts + self.carry :] if outer in env} | stacked

        def step(carry, xs):
            inside = Env(self.body, self.body_consts, [*fixed.items(), *zip(each, xs, strict=True)])
            inside.update((self._carry_in(n), value) for n, value in zip(carries, carry, strict=True))
            for eqn in body:
                inside.run(eqn)
            return [inside[self.body.outvars[n]] for n in carries], [inside[var] for var in outs]

        first = [env[self.eqn.invars[self.consts + n]] for n in carries]
        last, ys = jax.lax.scan(step, first, list(each.values()), length=self.length, reverse=self.reverse)
        for n, value in zip(carries, last, strict=True):
            env[self.eqn.outvars[n]] = value
        return ys
