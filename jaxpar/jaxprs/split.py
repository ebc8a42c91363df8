"""Splits a jaxpr into two halves: the equations that the first outputs need, and all others.

    B   the equations that the gradient of the input needs
    W   all other equations; the values of B that they read cross from B to W

No equation runs twice: B and W together have the matmuls of the full backward. A scan over layers becomes two scans,
and its crossing values are stacked. An equation that both halves need belongs to B.

Source of the split: Qi et al. 2023, arXiv:2401.10241, section 2.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

import jax
from jax.extend.core import ClosedJaxpr, JaxprEqn  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.jaxprs.dataflow import Env, Scan, needed_equations, variables


@dataclass(frozen=True, kw_only=True)
class SplitScan:
    """A scan in two halves: the outputs and equations of both, and the values that cross between them.

    Attributes:
      carries: Carries of the first half.
      ys: Stacked outputs of the first half.
      body: Equations of the first half.
      second_carries: Carries of the second half.
      second_ys: Stacked outputs of the second half.
      second_body: Equations of the second half.
      crossing: Variables of the body that the first half stacks for the second half.
    """

    carries: list[int]
    ys: list[int]
    body: list[JaxprEqn]
    second_carries: list[int] = field(default_factory=list)
    second_ys: list[int] = field(default_factory=list)
    second_body: list[JaxprEqn] = field(default_factory=list)
    crossing: list = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SplitJaxpr:
    """A jaxpr in two halves: `first` computes some outputs, `second` the others, from the crossing values."""

    closed: ClosedJaxpr
    outs: list[int]
    shared_inputs: int
    first_equations: frozenset[int]  # equations of the first half
    second_equations: frozenset[int]  # equations of the second half
    loops: dict[int, SplitScan]  # scans of the first half; those also in `late` run in both halves
    crossing: list

    @staticmethod
    def split(closed: ClosedJaxpr, *, first: Iterable[int], again: int) -> "SplitJaxpr":
        """Splits a jaxpr.

        Args:
          closed: The jaxpr.
          first: Indices of the outputs that the first half computes.
          again: Number of leading inputs that both halves receive, and that therefore do not cross.
        """
        jaxpr, outs = closed.jaxpr, list(first)
        # in reverse from the early outputs: an equation that computes a needed variable is early, and needs its inputs
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
        # in reverse from the other outputs, up to variables that the first half computes
        second_half: set[int] = set()
        need = variables(var for n, var in enumerate(jaxpr.outvars) if n not in outs)
        for i in reversed(range(len(jaxpr.eqns))):
            eqn = jaxpr.eqns[i]
            wanted = {n for n, var in enumerate(eqn.outvars) if var in need and var not in early_vars}
            if not wanted:
                continue
            second_half.add(i)
            if i in loops:
                loops[i], inputs = _Scan(eqn).second_half(wanted, loops[i])
            else:
                inputs = eqn.invars
            need |= variables(inputs)
        # in the order of the jaxpr, not of a set: the stash must have the same structure in every trace
        shared_inputs = set(jaxpr.invars[:again])
        order = [*jaxpr.invars, *(var for eqn in jaxpr.eqns for var in eqn.outvars)]
        crossing = [var for var in order if var in need and var in early_vars and var not in shared_inputs]
        return SplitJaxpr(
            closed=closed,
            outs=outs,
            shared_inputs=again,
            first_equations=frozenset(whole),
            second_equations=frozenset(second_half),
            loops=loops,
            crossing=crossing,
        )

    def first(self, args: Sequence) -> tuple[list, list]:
        """Computes the early outputs and the crossing values."""
        jaxpr = self.closed.jaxpr
        env = Env(jaxpr, self.closed.consts, zip(jaxpr.invars, args, strict=True))
        stacks: list = []
        for i, eqn in enumerate(jaxpr.eqns):
            if i in self.first_equations:
                env.run(eqn)
            elif i in self.loops:
                stacks += _Scan(eqn).run_first(env, self.loops[i])
        return [env[jaxpr.outvars[i]] for i in self.outs], [env[var] for var in self.crossing] + stacks

    def second(self, args: Sequence, stash: Sequence) -> list:
        """Computes the other outputs from the crossing values."""
        jaxpr = self.closed.jaxpr
        # `args` are the first `again` inputs; the stash is the crossing values, then the stacks of each scan in order
        env = Env(jaxpr, self.closed.consts, zip(jaxpr.invars, args, strict=False))
        env.update(zip(self.crossing, stash, strict=False))
        start = len(self.crossing)
        for i, eqn in enumerate(jaxpr.eqns):
            if i in self.loops:
                count = len(self.loops[i].crossing)
                if i in self.second_equations:
                    _Scan(eqn).run_second(env, self.loops[i], stash[start : start + count])
                start += count
            elif i in self.second_equations:
                env.run(eqn)
        return [env[var] for n, var in enumerate(jaxpr.outvars) if n not in self.outs]


class _Scan(Scan):
    """A scan equation that is split in two halves."""

    def _carry_in(self, n: int):
        return self.body.invars[self.consts + n]

    def first_half(self, wanted: set[int]) -> tuple[SplitScan, list]:
        """Builds the first half, which computes the wanted outputs; also returns the outer variables that it reads."""
        carries = {n for n in wanted if n < self.carry}
        # a carry that one iteration reads is computed in the previous one: repeats until no more carries are needed
        while True:
            outs = [self.body.outvars[n] for n in wanted | carries]
            body, reads = needed_equations(self.body.eqns, outs)
            new_carries = {n for n in range(self.carry) if self._carry_in(n) in reads} - carries
            if not new_carries:
                break
            carries |= new_carries
        ys = sorted(n - self.carry for n in wanted if n >= self.carry)
        inputs = [outer for outer, inner in zip(self.eqn.invars, self.body.invars, strict=True) if inner in reads]
        inputs += [self.eqn.invars[self.consts + n] for n in carries]
        return SplitScan(carries=sorted(carries), ys=ys, body=body), inputs

    def second_half(self, wanted: set[int], loop: SplitScan) -> tuple[SplitScan, list]:
        """Adds the second half, which computes the wanted outputs; returns the loop and the variables that it reads."""
        computed = {var for eqn in loop.body for var in eqn.outvars} | {self._carry_in(n) for n in loop.carries}
        remaining = [eqn for eqn in self.body.eqns if not any(eqn is loop_eqn for loop_eqn in loop.body)]
        carries = {n for n in wanted if n < self.carry}
        while True:
            body, reads = needed_equations(remaining, [self.body.outvars[n] for n in wanted | carries])
            new_carries = {n for n in range(self.carry) if self._carry_in(n) in reads} - carries - set(loop.carries)
            if not new_carries:
                break
            carries |= new_carries
        order = [*self.body.invars, *(var for eqn in self.body.eqns for var in eqn.outvars)]
        both_halves = SplitScan(
            carries=loop.carries,
            ys=loop.ys,
            body=loop.body,
            second_carries=sorted(carries),
            second_ys=sorted(n - self.carry for n in wanted if n >= self.carry),
            second_body=body,
            crossing=[var for var in order if var in reads and var in computed],
        )
        outer_inputs = [
            outer for outer, inner in zip(self.eqn.invars, self.body.invars, strict=True)
            if inner in reads and inner not in computed
        ]  # fmt: skip
        return both_halves, outer_inputs + [self.eqn.invars[self.consts + n] for n in carries]

    def run_first(self, env: "Env", loop: SplitScan) -> list:
        """Runs the first half: writes its outputs to `env`, returns the crossing values, stacked."""
        outs = [self.body.outvars[self.carry + n] for n in loop.ys] + loop.crossing
        ys = self._run(env, loop.body, loop.carries, outs, {})
        for n, value in zip(loop.ys, ys, strict=False):
            env[self.eqn.outvars[self.carry + n]] = value
        return ys[len(loop.ys) :]

    def run_second(self, env: "Env", loop: SplitScan, stacks: Sequence) -> None:
        """Runs the second half, and writes its outputs to `env`."""
        outs = [self.body.outvars[self.carry + n] for n in loop.second_ys]
        ys = self._run(env, loop.second_body, loop.second_carries, outs, dict(zip(loop.crossing, stacks, strict=True)))
        for n, value in zip(loop.second_ys, ys, strict=True):
            env[self.eqn.outvars[self.carry + n]] = value

    def _run(self, env: "Env", body: Sequence[JaxprEqn], carries: Sequence[int], outs: list, stacked: dict) -> list:
        inputs = list(zip(self.eqn.invars, self.body.invars, strict=True))
        # only the inputs of this half: the second half has x and g only if they cross
        fixed = {inner: env[outer] for outer, inner in inputs[: self.consts] if outer in env}
        stacks = {inner: env[outer] for outer, inner in inputs[self.consts + self.carry :] if outer in env} | stacked

        def step(carry, xs):
            body_env = Env(self.body, self.body_consts, [*fixed.items(), *zip(stacks, xs, strict=True)])
            body_env.update((self._carry_in(n), value) for n, value in zip(carries, carry, strict=True))
            for eqn in body:
                body_env.run(eqn)
            return [body_env[self.body.outvars[n]] for n in carries], [body_env[var] for var in outs]

        first = [env[self.eqn.invars[self.consts + n]] for n in carries]
        last, ys = jax.lax.scan(step, first, list(stacks.values()), length=self.length, reverse=self.reverse)
        for n, value in zip(carries, last, strict=True):
            env[self.eqn.outvars[n]] = value
        return ys
