"""Dead-code elimination for selected outputs, also through scan carries.

    scan: x, count ──► layer ──► x', count + 1        count + 1 alone: a scan that carries no x

`dataflow.needed_equations` keeps all outputs of a scan. This module reduces a scan to the needed carries, inputs and
outputs, so that a counter can be computed without state that depends on the layers' results.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import jax
from jax.extend.core import Jaxpr, JaxprEqn, Var

from jaxpar.jaxprs.dataflow import Env, Scan, variables


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
