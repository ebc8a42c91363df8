"""Layers of stages that differ in their number: one scan over those of the fullest, cut short where there are fewer.

    scan, length 8   x ──► layer 0 ──► ... ──► layer 6 ──► layer 7 ──► y    on a stage of 8 layers
                     x ──► layer 0 ──► ... ──► layer 6 ─────(x)──────► y    on one of 7: the last turn changes nothing

Run one by one after a scan over the fewest, the layers that not all stages have would each be a slice of parameters,
kept values and gradients: copies of a stage, and no scan that could read and write them where they are.
"""

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.extend.core import ClosedJaxpr, Jaxpr, JaxprEqn, Literal, jaxpr_as_fun  # pyright: ignore[reportPrivateImportUsage]

from jaxpar.pipeline.jaxprs.dataflow import CALLS, REMAT, Env, Scan, Traced, consts_of, jaxpr_of, needed, parts
from jaxpar.pipeline.jaxprs.shorten import KEEP_LAYERS


def counted(layers: Callable, params: Any, *args: Any) -> Callable | None:
    """Returns (count, params, *args) to y: the first `count` layers of a stack.

    Args:
      layers: (params, *args) to y. Runs all layers of a stack.
      params: The stack: arrays or shapes, with a leading dim of layers.
      args: Its other arguments.

    Returns:
      None where the layers are not one scan over the stack, of which nothing but the carry is read: results of each
      layer that are stacked would be there of all of them.
    """
    traced = Traced(layers, params, *args)
    leaves = len(jax.tree.leaves(params))
    stack = [n < leaves for n in range(len(traced.closed.jaxpr.invars))]

    def run(count: Any, *args: Any) -> Any:
        evaluation = _Evaluation(count)
        jaxpr, consts = traced.closed.jaxpr, traced.closed.consts
        out = evaluation.run(jaxpr, consts, jax.tree.leaves(args), stack, jaxpr.outvars)
        if evaluation.scans != 1:
            raise _NotOneScan
        return jax.tree.unflatten(traced.outputs, out)

    try:
        jax.eval_shape(run, jnp.zeros((), jnp.int32), params, *args)
    except _NotOneScan:
        return None
    return run


class _NotOneScan(Exception):
    """Says of layers that they are something else than one scan over their parameters."""


class _Evaluation:
    """Runs a jaxpr whose scan over a stack stops after so many layers."""

    def __init__(self, count: Any):
        self.count, self.scans = count, 0

    def run(self, jaxpr: Jaxpr, consts: Sequence, args: Sequence, stack: Sequence[bool], outs: Sequence) -> list:
        """Returns the values of `outs`; `stack` says which arguments are parameters of all layers."""
        env = Env(jaxpr, consts, zip(jaxpr.invars, args, strict=True))
        stacks = {var for var, yes in zip(jaxpr.invars, stack, strict=True) if yes}
        eqns, read = needed(jaxpr.eqns, outs)
        for eqn in eqns:
            which = [not isinstance(var, Literal) and var in stacks for var in eqn.invars]
            if not any(which):
                env.run(eqn)
            elif eqn.primitive.name == "scan":
                self._scan(env, eqn, which, read)
            elif eqn.primitive.name in CALLS:
                self._call(env, eqn, which, read)
            elif eqn.primitive.name in KEEP_LAYERS:
                env.run(eqn)
                stacks |= set(eqn.outvars)
            else:
                raise _NotOneScan
        if stacks.intersection(var for var in outs if not isinstance(var, Literal)):
            raise _NotOneScan
        return [env[var] for var in outs]

    def _call(self, env: Env, eqn: JaxprEqn, which: list[bool], read: set) -> None:
        """Runs a call in which a stack is read; one that is to be computed again in the backward is one afterwards."""
        inner = eqn.params.get("jaxpr", eqn.params.get("call_jaxpr"))
        jaxpr, consts = jaxpr_of(inner), consts_of(inner)
        wanted = [(outer, var) for outer, var in zip(eqn.outvars, jaxpr.outvars, strict=True) if outer in read]

        def run(count, *args):
            # `count` is an argument, and not of the function around it: `jax.checkpoint` traces what it is given
            own = _Evaluation(count)
            out = own.run(jaxpr, consts, args, which, [var for _, var in wanted])
            self.scans += own.scans
            return out

        if eqn.primitive.name in REMAT:
            run = jax.checkpoint(run, policy=eqn.params["policy"], prevent_cse=eqn.params["prevent_cse"])
        out = run(self.count, *(env[var] for var in eqn.invars))
        env.update(zip([outer for outer, _ in wanted], out, strict=True))

    def _scan(self, env: Env, eqn: JaxprEqn, which: list[bool], read: set) -> None:
        """Runs the scan over the stack."""
        scan = Scan(eqn)
        first = scan.consts + scan.carry
        if any(which[:first]) or read.intersection(eqn.outvars[scan.carry :]):
            raise _NotOneScan
        self.scans += 1
        fixed, start, xs = parts([env[var] for var in eqn.invars], [scan.consts, scan.carry, scan.xs])
        body = jaxpr_as_fun(ClosedJaxpr(scan.body, scan.body_consts))

        def step(carry, each):
            number, xs = each
            # all stages run all turns: such a tick takes as long as on the fullest stage anyway
            new = body(*fixed, *carry, *xs)[: scan.carry]
            return [jnp.where(number < self.count, a, b) for a, b in zip(new, carry, strict=True)], None

        numbers = jnp.arange(scan.length, dtype=jnp.int32)
        name = str(eqn.source_info.name_stack)
        with jax.named_scope(name) if name else jax.named_scope("layers"):
            last, _ = jax.lax.scan(
                step, start, (numbers, xs), **{key: eqn.params[key] for key in ("length", "reverse", "unroll")}
            )
        env.update(zip(eqn.outvars, last, strict=False))
