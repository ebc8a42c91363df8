"""A jaxpr without what some of its results do not follow from, inside of its scans too.

    scan: x, count ──► layer ──► x', count + 1        count + 1 alone: a scan that carries no x

`dataflow.needed` keeps a scan whole. Here it is run with those carries, inputs and outputs that are wanted, so that
state which only counts is told apart from state that follows from what a layer computes.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpar.pipeline.jaxprs.dataflow import Env, Scan, variables


class Narrow:
    """What some results of a jaxpr follow from.

    Attributes:
      reads: The variables that are read.
    """

    def __init__(self, jaxpr: Jaxpr, outs: Iterable):
        self.jaxpr, self.outs = jaxpr, list(outs)
        self.reads, self._run = variables(self.outs), []
        for eqn in reversed(jaxpr.eqns):
            if self.reads.intersection(eqn.outvars):
                kept = _NarrowScan(eqn, self.reads) if eqn.primitive.name == "scan" else eqn
                self._run.append(kept)
                self.reads |= variables(eqn.invars) if isinstance(kept, JaxprEqn) else kept.reads

    def __call__(self, consts: Sequence, values: dict[Var, Any]) -> list:
        """Returns the results, from the values of the jaxpr's inputs that are read."""
        env = Env(self.jaxpr, consts, values.items())
        for kept in reversed(self._run):
            env.run(kept) if isinstance(kept, JaxprEqn) else kept.run(env)
        return [env[var] for var in self.outs]


class _NarrowScan:
    """A scan with those of its carries, stacked inputs and stacked outputs that are wanted."""

    def __init__(self, eqn: JaxprEqn, wanted: set[Var]):
        self.scan, self.eqn = (scan := Scan(eqn)), eqn
        outs = {i for i, var in enumerate(eqn.outvars) if var in wanted}
        inputs = scan.body.invars
        while True:
            self.body = Narrow(scan.body, [scan.body.outvars[i] for i in sorted(outs)])
            # a carry that is read is wanted as well, and what it follows from
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
        """Computes the outputs that are wanted."""
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
